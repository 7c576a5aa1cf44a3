"""The assets in pipeline order, one module for each group of the UI.

Each asset resolves its inputs, calls one function of pf_core and returns metadata.
"""
