"""Metadata of the asset pages: counts, tables and plots, made from manifests.

One module for each module of `pf_assets.assets`, with one `describe_` function for each asset. Read `pages.py` first:
it has what they share. `check_results.py` turns the checks of pf_core into results of asset checks.
"""
