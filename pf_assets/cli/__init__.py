"""The `pf` command line: commands for developers and for the person who runs a site.

`main.py` lists the commands; each module implements those of one idea. May import everything in pf_assets and pf_core.
"""
