"""Peers: other people's recommenders, each in a process and an environment of its own, tuned with an equal budget.

Read `run.py` first; `tuning.py` lists the settings, `environments.py` installs, `scripts/` has the programs.
"""
