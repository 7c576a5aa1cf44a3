"""One YAML file describes a site: its logs, the days, and how the pipeline runs on it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    AliasChoices,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pf_core.config.base import Strict
from pf_core.config.serving import ServingConfig
from pf_core.config.source import Source
from pf_core.config.training_section import AnswerColumn, TrainingConfig
from pf_core.days import parse_ds
from pf_core.errors import PipelineError
from pf_core.storage.files import is_remote, local_dir, path_of

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")

_PLACEHOLDER = re.compile("\ue000(?P<number>[\ue100-\uf8ff])\ue001*\ue002")
"""Characters for private use, of which `_FIRST_NUMBER` and those after it number the variables."""

_FIRST_NUMBER = 0xE100

_TYPES_OF_VALUES = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "timestamp")}


def _ds_text(value: Any) -> str:
    """Return a day as text, YYYY-MM-DD; YAML reads 2026-01-01 as a date."""
    text = str(value)
    parse_ds(text)
    return text


class TimelineConfig(Strict):
    """How user timelines are built and stored."""

    num_buckets: int = Field(default=8, ge=1, le=65_536)
    """Number of buckets that users are divided into by hash of the user id; one worker holds one bucket in memory.
    Changing it means re-materializing raw_actions and rebuilding everything after it."""
    window_days: int = Field(default=365, ge=1)
    """Number of days that a timeline reaches back; older actions are left out."""
    max_actions: int = Field(default=10_000, ge=1)
    """Largest number of actions of one user's timeline; the newest are kept."""
    segment_actions: int = Field(default=64, ge=1, validation_alias=AliasChoices("segment_actions", "piece_actions"))
    """Number of actions of a user that are stored together. A day rewrites at most this many old actions of an
    active user. The old name `piece_actions` is still read."""
    retention_days: int = Field(default=60, ge=2)
    """Number of days whose timelines stay readable; older days and their files are removed."""
    compact_after_fragments: int = Field(default=24, ge=2)
    """Number of Lance fragments of a bucket beyond which small ones are merged: more cost readers time, fewer cost
    the daily build time."""


class EngineConfig(Strict):
    """Where per-bucket work runs: in processes of this machine, or as tasks of a Spark cluster."""

    kind: Literal["local", "spark"] = "local"
    """local runs processes of this machine, spark runs tasks of a Spark cluster."""
    num_workers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    """Number of buckets that are processed at the same time: processes of this machine (by default one for each
    core), or cores of the cluster."""
    memory_mb: int = Field(default=2048, ge=64)
    """Memory of the shuffle over all workers together, in MB; beyond it, rows are spilled to disk."""
    master: str | None = None
    """Address of the Spark cluster: spark://host:7077, yarn, k8s://…; only for spark."""
    spark: dict[str, str] = Field(default_factory=dict)
    """Spark's own settings, such as spark.executor.memory; only for spark."""

    @model_validator(mode="after")
    def _spark_has_a_master(self) -> "EngineConfig":
        if self.kind == "spark" and self.master is None:
            raise ValueError("kind: spark needs a master, such as spark://host:7077")
        if self.kind == "local" and (self.master is not None or self.spark):
            raise ValueError("master and spark are settings of kind: spark")
        return self


class QualityConfig(Strict):
    """Limits beyond which a day's logs are abnormal; the assets downstream are then not built. For an
    abnormal volume this holds for the newest day; a day before others, as in a backfill, is a warning."""

    max_quarantined_share: float = Field(default=0.02, ge=0, le=1)
    """Largest share of a day's rows that may be quarantined."""
    trailing_weeks: int = Field(default=4, ge=0)
    """Number of past weeks in which days of the same weekday are compared with; 0 never compares by weekday. A weekday
    that had no actions in most of at least two such weeks is closed: then few or no actions are normal. While fewer
    than two are known, a day without a file passes that `source.actions.missing_days: allow` permits."""
    trailing_days: int = Field(default=14, ge=1)
    """Number of days before that a day is compared with while too few days of the same weekday have actions."""
    min_trailing_days: int = Field(default=3, ge=1)
    """Number of earlier days with actions that a comparison needs; with fewer, any volume above zero passes."""
    min_volume_ratio: float = Field(default=0.5, ge=0)
    """Least ratio of a day's actions to the median of the compared days; 0 lets a day without actions pass."""
    max_volume_ratio: float = Field(default=2.0, gt=0)
    """Largest ratio of a day's actions to the median of the compared days."""
    min_feature_coverage: float = Field(default=0.9, ge=0, le=1)
    """Least share of a day's actions whose pin has a content vector; below it, a warning. It is not checked for a site
    without `source.pins.vectors`."""


class Site(Strict):
    """The content of a site file."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=100)
    """Name of the site: letters, digits, _ and -. It is the name of the folder with its assets."""
    start_ds: str
    """First day of the site, YYYY-MM-DD (UTC): the first partition of the daily assets."""
    end_ds: str | None = None
    """Last day of the site, YYYY-MM-DD (UTC); without it, a new day is added every day."""
    data_dir: str = "../data"
    """Folder in which everything is written: the site's own folder (its name), and `mlflow`. A path relative to the
    site file, or s3://bucket/folder. The default is `data` beside the folder of the site file: for
    /logs/mysite/site.yaml, /logs/data."""
    deletion_list: str | None = None
    """File (a path, or s3://…) with a line for each user who is removed and stays out: `{"user_id": 777}` or
    `{"user_id": "alice"}`, as `pf forget` writes them; a plain id is read, too, if it can mean one user only. If the
    file is named, it must exist."""
    source: Source
    """Where the logs and the pins are, and how they are read."""
    timelines: TimelineConfig = TimelineConfig()
    """How user timelines are built and stored."""
    engine: EngineConfig = EngineConfig()
    """Where per-bucket work runs."""
    quality: QualityConfig = QualityConfig()
    """Limits beyond which a day's logs are abnormal."""
    training: TrainingConfig = TrainingConfig()
    """The training set, the model and how training is launched."""
    serving: ServingConfig = ServingConfig()
    """How users are embedded, indexed and released."""

    @field_validator("start_ds", "end_ds", mode="before")
    @classmethod
    def _dates_as_text(cls, value: Any) -> Any:
        return None if value is None else _ds_text(value)

    @model_validator(mode="after")
    def _days_in_order(self) -> "Site":
        if self.end_ds is not None and self.end_ds < self.start_ds:
            raise ValueError(f"end_ds {self.end_ds} is before start_ds {self.start_ds}")
        late_days = self.source.actions.late_days
        if self.serving.retention_days < late_days + 2:
            raise ValueError(
                f"serving.retention_days is {self.serving.retention_days}: late rows of {late_days} days need at least "
                f"{late_days + 2}"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_a_column(self) -> "Site":
        named = self.source.actions.columns
        if self.answers is not None and named is not None and self.answers.column not in named:
            raise ValueError(
                f"`source.actions.columns` does not name {self.answers.column!r}, which `training.users.column` reads"
            )
        return self

    @property
    def directory(self) -> Path:
        """Folder of this site's assets, on disk or in object storage."""
        return path_of(self.data_dir) / self.name

    @property
    def workspace(self) -> Path:
        """Local folder for temporary files and what only this machine needs; for assets on disk, their own folder."""
        if not is_remote(self.directory):
            return self.directory
        return local_dir() / f"{self.name}-{hashlib.sha256(self.data_dir.encode()).hexdigest()[:8]}"

    @property
    def log_root(self) -> Path:
        """Folder that the paths of the source are relative to."""
        return path_of(self.source.root)

    @property
    def answers(self) -> AnswerColumn | None:
        """The column of the log that says who may be learned from, if `training.users` names one."""
        return None if self.training.users is None else self.training.users.answers

    def fingerprint(self) -> str:
        """Hash of all settings that decide what the data assets contain."""
        content = self.model_dump_json(exclude={"engine", "training", "serving"})
        if self.answers is not None:
            content += json.dumps([self.answers.column, self.answers.values])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_site(path: Path, *, environment: Mapping[str, str]) -> Site:
    """Read and validate a site file. `${NAME}` is taken from `environment`; relative paths are relative to the file."""
    if path.is_dir():
        raise PipelineError(f"{path} is a folder", "name the site file in it")
    if not path.is_file():
        raise PipelineError(f"no site file at {path}", "set PF_SITE to the YAML file that describes your logs")
    try:
        content = _SiteLoader(path.read_text(encoding="utf-8"), environment, path).get_single_data()
    except OSError as error:
        raise PipelineError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise PipelineError(f"{path} is not valid YAML: {_without_content(error)}") from None
    except RecursionError:
        raise PipelineError(f"{path} is not a site file: its values are nested too deeply") from None
    if not isinstance(content, dict):
        raise PipelineError(f"{path} must hold a mapping with name, start_ds and source")
    try:
        site = Site.model_validate(content)
    except ValidationError as error:
        raise PipelineError(f"{path}:\n{_explain(error)}") from None  # its text quotes values, and so a secret
    deletion_list, training = site.deletion_list, site.training
    if training.users is not None and training.users.file is not None:
        users = training.users.model_copy(update={"file": _from(path, "training.users.file", training.users.file)})
        training = training.model_copy(update={"users": users})
    return site.model_copy(
        update={
            "data_dir": _from(path, "data_dir", site.data_dir),
            "deletion_list": None if deletion_list is None else _from(path, "deletion_list", deletion_list),
            "source": site.source.model_copy(update={"root": _from(path, "source.root", site.source.root)}),
            "training": training,
        }
    )


def _from(site_file: Path, key: str, path: str) -> str:
    """Make a path of the site file absolute; a URL stays as it is."""
    if "://" not in path:
        return str((site_file.resolve().parent / path).resolve())
    try:
        return str(path_of(path))
    except PipelineError as error:
        raise PipelineError(f"{site_file}: {key}: {error.what}", error.remedy) from None


class _SiteLoader(yaml.SafeLoader):
    """Reads YAML with `${NAME}` and `${NAME:-default}` in its scalars.

    Variables are replaced after parsing, so that quotes, colons and newlines in a value are part of the value. Until
    then a placeholder of the same length stands for each, which keeps the columns in error messages right. A scalar
    that is a variable alone and is not quoted gets the type of its value: a number, true or false, a day, or null.

    YAML lets a later key silently replace an earlier one; here that is an error. So is a variable in a key, mostly one
    whose colon has no space after it: an error would quote the key, and with it the value.
    """

    def __init__(self, text: str, environment: Mapping[str, str], path: Path) -> None:
        self._variables: list[re.Match[str]] = []
        self._with_variable: list[yaml.ScalarNode] = []
        self._environment, self._path = environment, path
        super().__init__(_VARIABLE.sub(self._placeholder, text))

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        is_alone = not node.style and _PLACEHOLDER.fullmatch(node.value)
        value = _PLACEHOLDER.sub(self._value, node.value)
        if value != node.value:
            self._with_variable.append(node)
        if is_alone:
            tag = self.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
            node.tag = tag if tag in _TYPES_OF_VALUES else "tag:yaml.org,2002:str"
        node.value = value
        return node

    def construct_typed(self, node: yaml.ScalarNode) -> Any:
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except ValueError:  # it only looks like a day or a number, such as 2026-02-30: the text is validated
            return node.value

    def _placeholder(self, variable: re.Match[str]) -> str:
        self._variables.append(variable)
        number = chr(_FIRST_NUMBER + len(self._variables) - 1)
        return f"\ue000{number}".ljust(len(variable[0]) - 1, "\ue001") + "\ue002"

    def _value(self, placeholder: re.Match[str]) -> str:
        variable = self._variables[ord(placeholder["number"]) - _FIRST_NUMBER]
        name, default = variable["name"], variable["default"]
        if name in self._environment:
            return self._environment[name]
        if default is not None:
            return default
        raise PipelineError(
            f"{self._path} needs the environment variable {name}, which is not set", f"set {name}, then re-run"
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if any(key is scalar for scalar in self._with_variable):
                raise yaml.MarkedYAMLError(
                    problem="a key has a variable (is a space missing after a colon?)", problem_mark=key.start_mark
                )
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(
                    f"key {key!r} appears twice in the mapping from line {node.start_mark.line + 1} on"
                )
        return super().construct_mapping(node, deep)


for _tag in _TYPES_OF_VALUES:
    _SiteLoader.add_constructor(_tag, _SiteLoader.construct_typed)


def _without_content(error: yaml.YAMLError) -> str:
    """Describe a YAML error and its place, without quoting the line: a secret may have been substituted into it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error)


def _explain(error: ValidationError) -> str:
    """One line for each problem: the key, and what is wrong with its value."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "is not a known key (a typo?)"
        lines.append(f"  {field}: {message}" if field else f"  {message}")
    return "\n".join(lines)
