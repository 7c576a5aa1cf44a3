"""MLflow: runs, the model registry, and the experiments' results.

Read `runs.py` first, then `tracking.py`, which adds the registry: candidate, champion and promotions.
"""
