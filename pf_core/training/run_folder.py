"""Files of a training run's folder that others read: the history and the result. Readers do not need torch.

history.jsonl   a line for each measurement, while training runs
prepared/       what a model of parts reads of pins before each day, until the model is saved
checkpoints/    the newest checkpoints (model/checkpoint.py)
model/          the trained model (model/checkpoint.py)
result.json     written last: the run is finished
"""

from typing import NotRequired, TypedDict

HISTORY = "history.jsonl"

PREPARED = "prepared"

RESULT = "result.json"


class TrainingResult(TypedDict):
    """result.json."""

    num_steps: int
    chosen_steps: NotRequired[int]
    """Number of steps whose weights are the model's, where the training chose it; absent if they are the last."""
    num_processes: int
    num_parameters: int
    seconds: float
    """Duration of the training over all its attempts, with evaluation."""
    metrics: dict[str, float]
    """Last value of every measured quantity."""
