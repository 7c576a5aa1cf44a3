"""From the site's log files to raw_actions: read, map, route to days and buckets, quarantine.

Read `ingest.py` first. May import config, storage and engine.
"""
