"""Start the training processes, follow them, and end them.

Read `training.py` first; `train_job.py` is what each rank runs.
"""
