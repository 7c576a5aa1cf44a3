"""From timelines to a model (paper, sections 3.3 to 3.5): the cut, sampling, loss, the training loop.

Read `trainer.py` first. May import the data folders, model and metrics; never evaluation or the serving wing.
"""
