"""The paper's tables and figures: recipes, claims, and whether a claim holds (section 4.2).

Read `recipes.py` first. May import evaluation, training and everything below, never the serving wing.
"""
