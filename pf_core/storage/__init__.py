"""Files on disk and in object storage: atomic writes, builds, retention, locks, the local cache.

Read `files.py` first. May import only the modules beside the folders.
"""
