"""What the model knows of a pin: catalogue files to pin_features, and features packed for lookup.

Read `features.py` first. May import config, storage, engine and logs.
"""
