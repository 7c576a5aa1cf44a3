"""The benchmark: our model, baselines and peers answer the same two questions about a log, and one table compares them.

Read `log.py` first. May import evaluation, training and everything below, never the serving wing.
"""
