"""The user tower and the pin tower (paper, sections 3.1 and 3.2), their input, their checkpoints and their device.

Read `towers.py` first. Knows tensors, not sites: may import config.training, storage and timelines.arrays.
"""
