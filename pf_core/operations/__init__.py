"""For the person who runs a site: repair a bad day, see what is missing or stale, look a user up.

Read `repair.py` first. May import serving, embeddings and the shared floors, never the training wing.
"""
