"""The site file and everything else that can be chosen, as validated models.

Read `site.py` first: a site file is one `Site`. May import storage.
"""
