"""The model of parts: taste, content, trend and memory. Imports config, days and timelines.arrays only.

Read `model.py` first, then `own_pins.py` and `statistics.py`, which make its inputs.
"""
