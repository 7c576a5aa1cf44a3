"""MLflow: runs, the model registry, and the experiments' results.

Read `tracking.py` first.
"""
