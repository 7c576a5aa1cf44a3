"""Everything about the model and its training that can be chosen: the paper's ablations are changes to these fields.

Frozen and validated; JSON in and out; `fingerprint` names a choice. Nothing here imports torch, so that a site file
can be read, and an asset graph drawn, without it. The paper's values are the defaults where it gives them; what it
leaves open is marked "ours".
"""

import hashlib
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from pf_core.config.base import Strict
from pf_core.errors import PipelineError

Objective = Literal["next_action", "sasrec", "all_action", "dense_all_action", "summed"]

Negatives = Literal["in_batch", "random", "mixed"]

LogQ = Literal["none", "negatives", "all", "corrected"]

Preset = Literal["paper", "demo", "tiny"]


class FeatureConfig(Strict):
    """Which parts make up an action's input vector (section 3.1; Table 6 removes them one at a time)."""

    pin_feature: bool = True
    action_type: bool = True
    surface: bool = True
    duration: bool = True
    absolute_time: bool = True
    since_latest: bool = True
    gap: bool = True
    position: bool = True
    """The learned positional encoding."""


class ModelConfig(Strict):
    """The user tower (A.2) and the pin tower."""

    features: FeatureConfig = FeatureConfig()
    sequence_types: tuple[str, ...] | None = None
    """Action types that a sequence holds; None is all of them. Others are neither read nor predicted (A.4 removes the
    weaker ones)."""
    sequence_length: int = Field(default=256, ge=1)
    num_layers: int = Field(default=6, ge=0)
    hidden_dim: int = Field(default=768, ge=1)
    num_heads: int = Field(default=8, ge=1)
    embedding_dim: int = Field(default=256, ge=1)
    category_dim: int = Field(default=16, ge=1)
    """Width of the action type's and the surface's embedding; ours: the paper says small."""
    pin_hidden_dim: int = Field(default=1024, ge=1)
    """Hidden width of the pin tower's MLP; ours: the paper gives none."""
    is_causal: bool = True
    """False is the paper's masking ablation: inner positions of sasrec and dense_all_action then see their targets."""
    near_identity_init: bool = True
    """Both towers start by passing the content vector through; ours, not the paper's (docs/LOG.md has both)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Ours: the paper mentions none."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is no multiple of num_heads {self.num_heads}")
        chosen = self.features.model_dump(exclude={"position"})
        if not any(chosen.values()):
            raise ValueError("every feature is switched off: the model would see nothing")
        return self


class SamplingConfig(Strict):
    """Which pairs a timeline gives (section 3.4) and the knobs of the on-the-fly dataset (section 3.5).

    The fourth knob, the sequence length, belongs to the model.
    """

    objective: Objective = "dense_all_action"
    window_days: float = Field(default=28.0, gt=0)
    """K: how far into the future a positive may lie (all_action and dense_all_action)."""
    equal_e1_weight: bool = True
    """sasrec: the newest embedding's pair weighs as much as all others of its sequence together (A.4)."""
    positive_types: tuple[str, ...] | None = None
    """Of the site's positive action types, those to learn from; None is all of them (multi-task)."""
    sequence_fraction: float = Field(default=1.0, gt=0, le=1)
    """Of a timeline's possible sequences, the share that is sampled each epoch."""
    max_sequences_per_user: int = Field(default=1, ge=1)
    max_positives_per_sequence: int = Field(default=32, ge=1)


class LossConfig(Strict):
    """Negatives, correction and temperature (section 3.3, A.3)."""

    kind: Literal["softmax", "bce"] = "softmax"
    """bce is SASRec's own: each pair against one negative drawn from the pool."""
    negatives: Negatives = "mixed"
    max_in_batch: int = Field(default=5000, ge=1)
    num_random: int = Field(default=8192, ge=1)
    """Over all ranks together: each draws its share, and all share the pool."""
    log_q: LogQ = "all"
    """none; negatives only; all: positive and negatives, the paper's; corrected: arXiv 2507.09331."""
    sketch_depth: int = Field(default=4, ge=1, le=16)
    sketch_width: int = Field(default=1 << 18, ge=16)
    """Shares are overestimated by about 1/width: keep it well above max_in_batch * candidates / num_random."""
    temperature: float = Field(default=0.1, ge=0.01)
    """Where the learned temperature starts; it never falls below 0.01."""
    chunk_rows: int = Field(default=256, ge=1)
    """Rows of the logit matrix held at a time."""

    @model_validator(mode="after")
    def _fits(self) -> "LossConfig":
        if self.sketch_width & (self.sketch_width - 1):
            raise ValueError(f"sketch_width {self.sketch_width} is no power of two")
        if self.kind == "bce" and self.log_q != "none":
            raise ValueError("binary cross-entropy has no log-Q correction: set log_q to none")
        return self


class OptimizerConfig(Strict):
    """AdamW with warm-up and decay; ours: the paper gives none of it."""

    num_steps: int = Field(default=100_000, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=1000, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    max_gradient_norm: float = Field(default=1.0, gt=0)


class TrainConfig(Strict):
    """One training run. With the data it decides the result; the number of processes changes only rounding and
    dropout."""

    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    seed: int = Field(default=0, ge=0)
    batch_users: int = Field(default=1024, ge=1)
    """Users of a step, over all ranks; the paper's 128 a GPU on 8 GPUs."""
    shuffle_batches: int = Field(default=32, ge=1)
    """Batches are cut from this many batches' worth of shuffled users, sorted by length: little padding."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 autocasts the towers, for GPUs (slow on most CPUs); the loss and the weights stay float32."""
    compile: bool = False
    """torch.compile the transformer."""
    log_every: int = Field(default=20, ge=1)
    evaluate_every: int = Field(default=500, ge=1)
    evaluate_users: int = Field(default=1000, ge=1)
    evaluate_pins: int = Field(default=100_000, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def paper() -> TrainConfig:
    """Section 4's model: M = 256, D = 256, and the largest of Table 9; ours: the near-identity start."""
    return TrainConfig(loss=LossConfig(sketch_width=1 << 22), precision="bfloat16", compile=True)


def demo() -> TrainConfig:
    """Useful after a few minutes on two CPU cores."""
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
    """Steps of milliseconds, for tests."""
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


def choose(preset: Preset, changes: dict[str, Any]) -> TrainConfig:
    """A preset with some fields changed: `{"model": {"num_layers": 4}, "seed": 1}`."""
    base = {"paper": paper, "demo": demo, "tiny": tiny}[preset]().model_dump()
    try:
        return TrainConfig.model_validate(_merged(base, changes))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise PipelineError("training: " + "; ".join(problems)) from error


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = (
            _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        )
    return result


class LaunchConfig(Strict):
    """How the training processes start. Several nodes need the same rendezvous, which one of them hosts, and a shared
    file system for the site's data_dir."""

    processes_per_node: int = Field(default=1, ge=1)
    num_nodes: int = Field(default=1, ge=1)
    rendezvous_endpoint: str | None = None
    """host:port; without it, one node finds itself."""
    rendezvous_id: str = "pinnerformer"
    max_restarts: int = Field(default=2, ge=0)
    """How often the processes start again from the last checkpoint when one of them dies."""
    num_workers: int = Field(default=1, ge=0)
    """Processes of each rank that sample examples ahead of the step."""
    threads_per_process: int | None = Field(default=None, ge=1)
    """CPU threads of a rank; by default its share of the cores."""

    @model_validator(mode="after")
    def _nodes_meet(self) -> "LaunchConfig":
        if self.num_nodes > 1 and self.rendezvous_endpoint is None:
            raise ValueError("num_nodes above 1 needs a rendezvous_endpoint (host:port) that every node reaches")
        return self


class TrainingConfig(Strict):
    """The site file's `training` section: what goes in, which model, how it is launched."""

    evaluation_days: int = Field(default=14, ge=0)
    """The cut: training ends this many days before the newest timelines, so that the rest can judge it."""
    held_out_share: float = Field(default=0.1, ge=0, lt=1)
    """Users, chosen by hash, whom training never sees."""
    preset: Preset = "demo"
    changes: dict[str, Any] = Field(default_factory=dict)
    """Fields of the preset that differ, nested as in TrainConfig."""
    launch: LaunchConfig = LaunchConfig()

    @property
    def train_config(self) -> TrainConfig:
        return choose(self.preset, self.changes)

    @model_validator(mode="after")
    def _changes_fit(self) -> "TrainingConfig":
        choose(self.preset, self.changes)
        return self
