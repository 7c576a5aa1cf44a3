"""Files on disk and in object storage: atomic writes, builds, locks, copies in the local cache.

Read `files.py` first. May import only the modules beside the folders.
"""
