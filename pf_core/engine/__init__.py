"""The data plane: shuffle, map_buckets, and Lance state with one version a day.

Read `base.py` first. May import config and storage.
"""
