"""The paper's offline evaluation (section 4.1): the question, the embedders, scores and promotion.

Read `protocol.py` first. May import training and everything below, never the serving wing.
"""
