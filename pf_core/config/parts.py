"""Settings of the model of parts: taste, content, trend and memory, with or without a transformer.

A user and a pin are compared by the sum of the parts:

    logit(u, i) = taste + content + trend, and the memory of pin i if the user has acted on it

The preset `auto` chooses these settings from the counts of the training set (`training/auto.py`). Nothing here imports
torch.
"""

from pydantic import Field, model_validator

from pf_core.config.base import Strict


class PartsConfig(Strict):
    """The parts of the model, each with a switch, and the rows that train them."""

    factor_dim: int = Field(default=64, ge=0)
    """Length of the pins' factors, the taste part; 0 switches it off."""
    content: bool = True
    """Whether content vectors are a part, where pins have them."""
    trend_dim: int = Field(default=8, ge=0)
    """Length of the trend part, which reads how often pins were used lately; 0 switches it off."""
    memory: bool = True
    """Whether a user's own pins have increments of their own. Without memory, training masks the user's own pins."""
    transformer_layers: int = Field(default=0, ge=0)
    """Layers of a transformer over the newest actions whose output is added to the user's vector; 0 for none."""
    transformer_dim: int = Field(default=64, ge=8)
    """Width of the transformer; a multiple of 8."""
    sequence_length: int = Field(default=64, ge=1)
    """Number of newest actions that the transformer reads."""
    heads: int = Field(default=2, ge=1, le=4)
    """Number of weighted sums over a user's own pins."""
    points_in_time: int = Field(default=4, ge=1)
    """Number of days at which factors are fitted for training; a row reads the newest that ends before its day."""
    window_days: int = Field(default=14, ge=1)
    """Number of days after a row's day whose positives are its targets."""
    min_window_days: int = Field(default=7, ge=1)
    """Number of days of targets that the last training day has at least."""
    day_decay_days: float = Field(default=90.0, gt=0)
    """A row's day is drawn with weight exp(-age / day_decay_days)."""
    days_per_step: int = Field(default=4, ge=1)
    """Number of days of a training step; the step's users are divided among them."""
    vector_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss of the vector alone, beside that of vector and memory together."""
    own_weight: float = Field(default=2.0, ge=0)
    """Weight of the loss of memory among the user's own pins alone."""
    discovery_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss of the vector on pins that are new to the user."""
    matrix_pull: float = Field(default=0.0, ge=0)
    """How fast the matrices of taste and content are pulled to where they started, as a multiple of the learning
    rate: few days of a log do not determine them."""
    pin_drop: float = Field(default=0.2, ge=0, lt=1)
    """Share of own pins that training leaves out of the weighted sums."""
    average: float = Field(default=0.97, ge=0, lt=1)
    """Decay of the averaged weights, which serve; 0 serves the last weights."""
    full_softmax_pins: int = Field(default=15_000, ge=1)
    """Largest number of pins over which the softmax is computed in full; beyond it, it is sampled."""
    num_negatives: int = Field(default=4096, ge=1)
    """Number of draws of a sampled softmax."""
    validation_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training users, chosen by hash, who choose the number of steps instead of training."""
    memory_size: int = Field(default=64, ge=1)
    """Largest number of own pins that a user's record remembers."""
    max_factor_pairs: int = Field(default=20_000_000, ge=1)
    """Largest number of (user, pin) pairs that factors are fitted on; beyond it, on a sample of the users."""

    @model_validator(mode="after")
    def _has_a_vector(self) -> "PartsConfig":
        if not (self.factor_dim or self.content or self.trend_dim):
            raise ValueError(
                "factor_dim, trend_dim and content (also off where no pin has a content vector) are all switched off: "
                "a vector would have no part; leave one of them on"
            )
        return self
