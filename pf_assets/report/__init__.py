"""The report on the paper: every table and figure beside our numbers, and a verdict for each claim.

Read `report.py` first.
"""
