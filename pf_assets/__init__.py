"""Orchestration only: each Dagster asset resolves its inputs, calls one function of pf_core and returns metadata.

Read `definitions.py` first: it lists the assets in pipeline order.
"""
