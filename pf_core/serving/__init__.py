"""What services read: the pin index, the store of users, releases, and the client.

Read `client.py` first. May import embeddings and the shared floors, never the training wing.
"""
