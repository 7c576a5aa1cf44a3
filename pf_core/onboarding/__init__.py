"""A site file from logs that nobody has described yet (`pf init`), and what a site file makes of its logs (`pf check`).

Read `draft.py` first. May import config, storage, engine and logs; `forecast.py` also training, whose rules it applies.
"""
