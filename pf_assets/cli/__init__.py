"""The `pf` command line.

`main.py` lists the commands; the other modules implement them.
"""
