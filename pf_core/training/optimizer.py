"""The learning rate of a step. Ours: the paper names no optimizer."""

import math

from pf_core.config.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then decay to zero after the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    share = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    match config.decay:
        case "none":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - share)
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
