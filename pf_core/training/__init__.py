"""From timelines to a model (paper, sections 3.3 to 3.5): the cut, sampling, loss, the training loop.

Read `trainer.py` first. May import everything below, never the serving wing.
"""
