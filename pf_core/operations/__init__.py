"""For the person who runs a site: repair a bad day, list what is missing or stale, look up a user, forget users.

Read `repair.py` first. May import serving, embeddings and the shared floors, never the training wing.
"""
