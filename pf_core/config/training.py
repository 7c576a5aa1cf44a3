"""The settings of the model and its training; the paper's ablations are changes to these fields.

Nothing here imports torch, so that a site file can be read, and the asset graph drawn, without it. The defaults are
the paper's values where it gives them; what it leaves open is marked "ours".
"""

import hashlib
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from pf_core.config.base import Strict
from pf_core.config.parts import PartsConfig
from pf_core.errors import PipelineError

Objective = Literal["next_action", "sasrec", "all_action", "dense_all_action", "summed"]

Negatives = Literal["in_batch", "random", "mixed"]

LogQ = Literal["none", "negatives", "all", "corrected"]

TowersPreset = Literal["paper", "demo", "tiny"]

TOWERS_SETTINGS = ("model", "sampling", "loss")
"""Settings of the towers, which a model of parts does not read."""


class FeatureConfig(Strict):
    """Which parts make up an action's input vector (section 3.1; Table 6 removes them one at a time)."""

    pin_feature: bool = True
    """Content vector of the pin."""
    action_type: bool = True
    """Learned embedding of the action type."""
    surface: bool = True
    """Learned embedding of the surface."""
    duration: bool = True
    """Logarithm of the duration."""
    absolute_time: bool = True
    """Encoding of the time of the action: learned phases of fixed periods, and the logarithm of its age."""
    since_latest: bool = True
    """Time from the action to the newest one of the sequence."""
    gap: bool = True
    """Time from the previous action to the action; 0 for the oldest one of the sequence."""
    position: bool = True
    """Learned positional encoding."""


class ModelConfig(Strict):
    """The user tower (appendix A.2) and the pin tower."""

    features: FeatureConfig = FeatureConfig()
    """Parts of an action's input vector."""
    sequence_types: tuple[str, ...] | None = None
    """Action types that a sequence holds; null means all of them. Others are neither read nor predicted (appendix
    A.4 removes the weaker ones)."""
    sequence_length: int = Field(default=256, ge=1)
    """M: number of a user's newest actions that the model reads."""
    num_layers: int = Field(default=6, ge=0)
    """Number of transformer layers of the user tower."""
    hidden_dim: int = Field(default=768, ge=1)
    """H: width of the transformer; a multiple of num_heads."""
    num_heads: int = Field(default=8, ge=1)
    """Number of attention heads."""
    embedding_dim: int = Field(default=256, ge=1)
    """D: length of user and pin embeddings."""
    category_dim: int = Field(default=16, ge=1)
    """Length of the embeddings of action types and surfaces; ours: the paper says small."""
    pin_hidden_dim: int = Field(default=1024, ge=1)
    """Hidden width of the pin tower's MLP; ours: the paper gives none."""
    is_causal: bool = True
    """Whether an action only sees those before it. False is the paper's masking ablation: inner positions of sasrec
    and dense_all_action then see their targets."""
    near_identity_init: bool = True
    """Whether both towers start by passing the content vector through; ours, not the paper's (docs/LOG.md has
    both)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations that training drops; ours: the paper mentions none."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}")
        chosen = self.features.model_dump(exclude={"position"})
        if not any(chosen.values()):
            raise ValueError("every feature is switched off: the model would see nothing")
        return self


class SamplingConfig(Strict):
    """Which training pairs a timeline gives (section 3.4), and the knobs of the on-the-fly dataset (section 3.5).

    The fourth knob, the sequence length, belongs to the model.
    """

    objective: Objective = "dense_all_action"
    """Which later actions the embeddings of a sequence are trained to predict (section 3.4)."""
    window_days: float = Field(default=28.0, gt=0)
    """K: number of days after an action within which a positive may lie (all_action and dense_all_action)."""
    equal_e1_weight: bool = True
    """For sasrec: whether the newest embedding's pair weighs as much as all others of its sequence together
    (appendix A.4)."""
    positive_types: tuple[str, ...] | None = None
    """Positive action types to learn from, out of the site's; null means all of them (multi-task)."""
    sequence_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of a timeline's possible sequences that is sampled in each epoch."""
    max_sequences_per_user: int = Field(default=1, ge=1)
    """Largest number of sequences that a timeline gives in an epoch."""
    max_positives_per_sequence: int = Field(default=32, ge=1)
    """Largest number of pairs that a sequence gives."""


class LossConfig(Strict):
    """Negatives, correction and temperature (section 3.3, appendix A.3)."""

    kind: Literal["softmax", "bce"] = "softmax"
    """softmax is the paper's sampled softmax; bce is SASRec's own loss: each pair against one negative drawn from
    the pool."""
    negatives: Negatives = "mixed"
    """Pool of negatives: other pairs' positives (in_batch), random candidates, or both (mixed)."""
    max_in_batch: int = Field(default=5000, ge=1)
    """Largest number of in-batch negatives, over all ranks."""
    num_random: int = Field(default=8192, ge=1)
    """Number of random negatives over all ranks: each rank draws its share, and all share the pool."""
    log_q: LogQ = "all"
    """Correction for how often a pin is drawn: none; negatives only; all: positive and negatives, the paper's;
    corrected: arXiv 2507.09331."""
    sketch_depth: int = Field(default=4, ge=1, le=16)
    """Number of hash functions of the count-min sketch that estimates how often a pin occurs."""
    sketch_width: int = Field(default=1 << 18, ge=16)
    """Number of counters for each hash function, a power of two. Shares are overestimated by about 1/width: keep it
    well above max_in_batch * candidates / num_random."""
    temperature: float = Field(default=0.1, ge=0.01)
    """Initial value of the learned temperature, which never falls below 0.01."""
    chunk_rows: int = Field(default=256, ge=1)
    """Number of rows of the logit matrix in memory at a time."""

    @model_validator(mode="after")
    def _fits(self) -> "LossConfig":
        if self.sketch_width & (self.sketch_width - 1):
            raise ValueError(f"sketch_width {self.sketch_width} is not a power of two")
        if self.kind == "bce" and self.log_q != "none":
            raise ValueError("binary cross-entropy has no log-Q correction: set log_q to none")
        return self


class OptimizerConfig(Strict):
    """AdamW with warm-up and decay; ours: the paper gives none of it."""

    num_steps: int = Field(default=100_000, ge=1)
    """Number of training steps."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=1000, ge=0)
    """Number of steps in which the learning rate rises from 0."""
    decay: Literal["none", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Norm that gradients are clipped to."""


class TrainConfig(Strict):
    """One training run. Together with the data it determines the result; the number of processes changes only
    rounding and dropout."""

    model: ModelConfig = ModelConfig()
    """The towers."""
    parts: PartsConfig | None = None
    """The model of parts; null trains the towers. With parts, `model`, `sampling` and `loss` are not read."""
    sampling: SamplingConfig = SamplingConfig()
    """Which pairs are sampled."""
    loss: LossConfig = LossConfig()
    """Negatives, correction and temperature."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, sampling and dropout."""
    batch_users: int = Field(default=1024, ge=1)
    """Number of users of a step over all ranks; the paper's 128 a GPU on 8 GPUs."""
    shuffle_batches: int = Field(default=32, ge=1)
    """Number of batches' worth of shuffled users that are sorted by length before batches are cut from them: more
    mean less padding."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 autocasts the towers, for GPUs (slow on most CPUs); the loss and the weights stay float32."""
    compile: bool = False
    """Whether the transformer is compiled by torch.compile."""
    log_every: int = Field(default=20, ge=1)
    """Number of steps between two logged losses."""
    evaluate_every: int = Field(default=500, ge=1)
    """Number of steps between two measurements of Recall@10 on held-out users."""
    evaluate_users: int = Field(default=1000, ge=1)
    """Number of held-out users of such a measurement."""
    evaluate_pins: int = Field(default=100_000, ge=1)
    """Number of candidate pins of such a measurement."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Number of steps between two checkpoints."""

    def fingerprint(self) -> str:
        """Hash of all settings."""
        unused = {"parts"} if self.parts is None else None  # the towers keep the hash from before there were parts
        return hashlib.sha256(self.model_dump_json(exclude=unused).encode()).hexdigest()[:16]


def paper() -> TrainConfig:
    """The model of section 4: M = 256, D = 256, and the largest of Table 9; ours: the near-identity start."""
    return TrainConfig(loss=LossConfig(sketch_width=1 << 22), precision="bfloat16", compile=True)


def demo() -> TrainConfig:
    """A model that is useful after a few minutes of training on two CPU cores."""
    return TrainConfig(
        model=ModelConfig(
            sequence_length=64,
            num_layers=2,
            hidden_dim=64,
            num_heads=8,
            embedding_dim=64,
            category_dim=8,
            pin_hidden_dim=256,
            dropout=0.2,
        ),
        sampling=SamplingConfig(max_positives_per_sequence=16),
        loss=LossConfig(num_random=1024, max_in_batch=2048),
        optimizer=OptimizerConfig(num_steps=1000, learning_rate=2e-3, warmup_steps=100, weight_decay=0.1),
        batch_users=128,
        evaluate_every=250,
        evaluate_pins=50_000,
        checkpoint_every=250,
    )


def tiny() -> TrainConfig:
    """A model with steps of milliseconds, for tests."""
    return TrainConfig(
        model=ModelConfig(
            sequence_length=8,
            num_layers=1,
            hidden_dim=16,
            num_heads=2,
            embedding_dim=8,
            category_dim=4,
            pin_hidden_dim=32,
        ),
        sampling=SamplingConfig(max_positives_per_sequence=4),
        loss=LossConfig(num_random=32, max_in_batch=64, sketch_width=1 << 10, chunk_rows=16),
        optimizer=OptimizerConfig(num_steps=20, learning_rate=1e-2, warmup_steps=2),
        batch_users=16,
        shuffle_batches=4,
        log_every=5,
        evaluate_every=10,
        evaluate_users=50,
        evaluate_pins=200,
        checkpoint_every=10,
    )


def auto() -> TrainConfig:
    """The settings of preset `auto` that do not depend on the training set; `training/auto.py` chooses the others."""
    return TrainConfig(
        parts=PartsConfig(),
        optimizer=OptimizerConfig(num_steps=200, learning_rate=3e-3, warmup_steps=20),
        batch_users=256,
        log_every=10,
        evaluate_every=25,
        checkpoint_every=100,
    )


def choose(preset: TowersPreset, changes: dict[str, Any]) -> TrainConfig:
    """Return a preset with some fields changed, such as `{"model": {"num_layers": 4}, "seed": 1}`."""
    return with_changes({"paper": paper, "demo": demo, "tiny": tiny}[preset](), changes)


def with_changes(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """Return a configuration with some fields changed; `changes` is nested as TrainConfig is."""
    try:
        return TrainConfig.model_validate(_merged(config.model_dump(), changes))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise PipelineError("training: " + "; ".join(problems)) from error


def change_auto(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """Return a configuration of preset `auto` with some fields changed; settings of the towers are refused."""
    refused = [name for name in TOWERS_SETTINGS if name in changes]
    refused += ["parts"] if changes.get("parts", {}) is None else []
    if refused:
        raise PipelineError(
            f"training: changes of {', '.join(refused)} have no effect on preset auto, which trains a model of parts",
            "delete them, or set training.preset to demo or paper",
        )
    return with_changes(config, changes)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = (
            _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        )
    return result
