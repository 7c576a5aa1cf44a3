"""What a person sees on an asset's page: counts, tables and plots, made from manifests.

`pages.py` has the pieces; the other modules have one function for each asset.
"""
