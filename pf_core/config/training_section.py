"""The site file's `training` section: the training set, the preset to start from, and how training is launched.

What it decides about a model is in `training.py`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

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


AnswerValue = str | int | float | bool

MAX_WHOLE = 2**53
"""Largest number up to which a column of floats has every whole number."""


@dataclass(frozen=True, kw_only=True)
class AnswerColumn:
    """The column of the log that says who agreed to be learned from."""

    column: str
    values: tuple[AnswerValue, ...]
    """What the column has in the rows of those who agreed."""


def _answer(value: Any) -> AnswerValue:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is no text, number, true or false: write in quotes what the column has")
    if value == "":
        raise ValueError("an empty text is a missing value, and whoever has none has not agreed")
    if not isinstance(value, str) and not (math.isfinite(value) and abs(value) <= MAX_WHOLE):
        raise ValueError(f"{value} is no number that can be compared exactly: write it in quotes, as the log has it")
    return value


class UsersConfig(Strict):
    """Who may be learned from; exactly one of `share`, `file` and `column`. Everybody is embedded all the same, and
    anybody may be held out to judge the model."""

    share: float | None = Field(default=None, gt=0, le=1)
    """Share of the users, chosen by hash, and independently of those who are held out. A larger share has all users of
    a smaller one."""
    file: str | None = None
    """File (a path, or s3://…) with a line for each user who may be learned from, in the format of `deletion_list`.
    The next training set is made from the file as it then is; if it changed, all days of pin_counts are counted
    again."""
    column: str | None = Field(default=None, min_length=1)
    """Column of the log that says who agreed, together with `values`: a user may be learned from if the user's newest
    row has one of them. Days that were ingested without the column, or with other values, are ingested again first."""
    values: Annotated[tuple[Annotated[AnswerValue, BeforeValidator(_answer)], ...], Field(min_length=1)] | None = None
    """Values of `column` that mean yes, such as [yes]. A text must be the column's text; a number is compared as a
    number, so that 1 is 1.0, too; true, as which YAML reads yes, on and true without quotes, stands for these three
    words in any case, and false for no, off and false."""

    @model_validator(mode="after")
    def _one_way(self) -> "UsersConfig":
        if sum(way is not None for way in (self.share, self.file, self.column)) != 1:
            raise ValueError("give exactly one of `share`, `file` and `column`")
        if self.column is not None and self.values is None:
            raise ValueError(
                "`values` is missing: list what `column` has in the rows of those who agreed, such as [yes]"
            )
        if self.column is None and self.values is not None:
            raise ValueError("`values` are those of a column of the log: name it in `column`")
        if {True, False} <= {value for value in self.values or () if isinstance(value, bool)}:
            raise ValueError(
                "`values` has both true and false, as which YAML reads yes, on, no and off without quotes: list what "
                "those who agreed have, in quotes"
            )
        return self

    @property
    def answers(self) -> AnswerColumn | None:
        """The column that decides, if one does."""
        if self.column is None:
            return None
        assert self.values is not None
        return AnswerColumn(column=self.column, values=self.values)


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
