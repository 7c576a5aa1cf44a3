"""Exact search, recall, entropy and coverage (paper, section 4.1) on tensors.

Read `recall.py` first. Knows no site and imports no other folder.
"""
