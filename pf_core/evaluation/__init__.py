"""The paper's offline evaluation (section 4.1): the question, the embedders that answer it, scores and promotion.

Read `protocol.py` first. May import training and everything below, never the serving wing.
"""
