"""One row for each user with the actions of the trailing window, built day by day.

Read `build.py` first. May import config, storage, engine and logs.
"""
