"""The assets and their checks; `pf_assets.definitions` lists them in pipeline order.

Each asset resolves its inputs, calls one function of pf_core and returns metadata. Each check resolves the days that it
is about and calls one function of pf_core for each of them.
"""
