"""For the person who runs a site: plan the repair of a bad day, list what is missing or stale, look up a user.

Read `repair.py` first. May import serving, embeddings and the shared floors, never the training wing.
"""
