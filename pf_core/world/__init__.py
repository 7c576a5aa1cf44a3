"""A synthetic Pinterest-like site with known ground truth, which writes its logs day by day.

It imports nothing from the rest of pf_core. Read `config.py` first, then `world.py`; `logs.py` writes the files.
"""
