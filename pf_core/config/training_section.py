"""The site file's `training` section: the training set, the preset to start from, and how training is launched.

What it decides about a model is in `training.py`.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from pf_core.config.base import Strict
from pf_core.config.training import TrainConfig, auto, change_auto, choose, demo

Preset = Literal["auto", "paper", "demo", "tiny"]


class LaunchConfig(Strict):
    """How the training processes are started (torch.distributed.run). Several nodes need the same rendezvous, which
    one of them hosts, and a shared file system for the site's data_dir."""

    processes_per_node: int = Field(default=1, ge=1)
    """Number of training processes (ranks) on each node; one for each GPU."""
    num_nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    rendezvous_endpoint: str | None = None
    """host:port at which the nodes meet; only one node needs none."""
    rendezvous_id: str = "pinnerformer"
    """Name of the job at the rendezvous; the same on all nodes."""
    max_restarts: int = Field(default=2, ge=0)
    """Number of times that the processes are restarted from the last checkpoint when one of them dies."""
    num_workers: int = Field(default=1, ge=0)
    """Number of processes of each rank that sample examples ahead of the step."""
    threads_per_process: int | None = Field(default=None, ge=1)
    """CPU threads of a rank; by default the environment variable OMP_NUM_THREADS, or else its share of the cores."""

    @model_validator(mode="after")
    def _nodes_meet(self) -> "LaunchConfig":
        if self.num_nodes > 1 and self.rendezvous_endpoint is None:
            raise ValueError("num_nodes above 1 needs a rendezvous_endpoint (host:port) that every node reaches")
        return self


class UsersConfig(Strict):
    """Who may be learned from; exactly one of `share` and `file`. Everybody is embedded all the same, and anybody may
    be held out to judge the model."""

    share: float | None = Field(default=None, gt=0, le=1)
    """Share of the users, chosen by hash, and independently of those who are held out. A larger share has all users of
    a smaller one."""
    file: str | None = None
    """File (a path, or s3://…) with a line for each user who may be learned from, in the format of `deletion_list`.
    The next training set is made from the file as it then is; if it changed, all days of pin_counts are counted
    again."""

    @model_validator(mode="after")
    def _one_way(self) -> "UsersConfig":
        if (self.share is None) == (self.file is None):
            raise ValueError("give exactly one of `share` and `file`")
        return self


class TrainingConfig(Strict):
    """The site file's `training` section: the training set, the model and how training is launched."""

    evaluation_days: int | None = Field(default=None, ge=0)
    """Number of newest days that training does not see: they evaluate the model. By default 14, or a quarter of the
    site's days if that is less. With 0 nothing can be evaluated, and `pf promote` chooses the model that serves."""
    held_out_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of users, chosen by hash, whom training never sees; the counts of pins leave them out, too."""
    users: UsersConfig | None = None
    """Who may be learned from; without it, everybody who is not held out."""
    preset: Preset = "auto"
    """Settings to start from. auto trains the model of parts, with settings chosen from the training set; paper, demo
    and tiny train the paper's towers."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Settings that differ from the preset, nested as in TrainConfig: `{model: {num_layers: 4}}`."""
    refit: bool = True
    """Whether an accepted model is trained once more until the newest day, with the same settings; that version
    serves. With false, the judged model serves."""
    launch: LaunchConfig = LaunchConfig()
    """How the training processes are started."""

    @property
    def towers_config(self) -> TrainConfig:
        """Configuration of the towers that recipes start from: the preset with the changes applied.

        Where the preset is auto, it is demo without changes: those of auto are settings of another model.
        """
        return demo() if self.preset == "auto" else choose(self.preset, self.changes)

    @model_validator(mode="after")
    def _changes_fit(self) -> "TrainingConfig":
        if self.preset == "auto":
            change_auto(auto(), self.changes)
        else:
            choose(self.preset, self.changes)
        return self
