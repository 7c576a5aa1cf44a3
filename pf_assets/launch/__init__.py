"""Training processes: start them, receive their measurements, and end them.

Read `training.py` first; `processes.py` starts the ranks, and `train_job.py` is what each rank runs.
"""
