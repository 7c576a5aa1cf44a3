"""The user tower and the pin tower (paper, sections 3.1 and 3.2), their input and their checkpoints.

Read `towers.py` first. Knows tensors, not sites: may import config.training, storage and timelines.arrays.
"""
