"""What the model knows of a pin: pin_features, built from catalogue files, and packed for training and inference.

Read `features.py` first. May import config, storage, engine and logs.
"""
