"""Programs that run in environments of their own, one for each peer: they import no module of ours but `exchange`.

Each is started as `python SCRIPT FOLDER --settings JSON --budget-s N --out lists.parquet`. Read exchange.py first.
"""
