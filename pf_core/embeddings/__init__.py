"""The daily embeddings (paper, section 3.6): active users, the merged snapshot, pins.

Read `users.py` first. May import the shared floors, never the training wing.
"""
