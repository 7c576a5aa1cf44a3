"""What services read: the pin index, the feature store, releases behind one pointer, and the client.

Read `client.py` first. May import embeddings and the shared floors, never the training wing.
"""
