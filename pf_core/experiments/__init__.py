"""The paper's tables and figures: recipes, claims, and the test of a claim (section 4.2).

Read `recipes.py` first. May import evaluation, training and everything below, never the serving wing.
"""
