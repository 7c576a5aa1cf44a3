"""The site file's `source` section: the event log, the pins, and which actions are positive.

It names the files (`files.py`), and for each field of our schemas how it is read from their columns (`fields.py`).
Nothing here touches a file: `logs/readers.py` opens them, `logs/mapping.py` translates their rows. Unknown keys are
errors, so that a typo never becomes a silently ignored option.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from pf_core.config.base import Strict
from pf_core.config.fields import CategoryField, DurationField, IdField, TimeField, column_shorthand
from pf_core.config.files import Files


class ActionsSource(Files):
    """The event log.

    A dated log (`{ds}` in the path) has one set of files for each day of *arrival*. A row that arrived up to
    `late_days` days after it happened belongs to the day on which it happened: partition ds reads the files of
    ds and, as far as they exist, of the `late_days` days after it. Rows that are later are quarantined in the
    partition of the day on which they arrived. In an undated log every row belongs to its own day.
    """

    user_id: Annotated[IdField, BeforeValidator(column_shorthand)]
    """The column with user ids."""
    pin_id: Annotated[IdField, BeforeValidator(column_shorthand)]
    """The column with pin ids."""
    ts: TimeField
    """The column with the time of the action."""
    action_type: Annotated[CategoryField, BeforeValidator(column_shorthand)]
    """How the type of the action is read."""
    surface: Annotated[CategoryField, BeforeValidator(column_shorthand)] = CategoryField(constant="unknown")
    """How the surface, on which the action happened, is read; without it, every surface is `unknown`."""
    duration_s: Annotated[DurationField, BeforeValidator(column_shorthand)] | None = None
    """The column with the duration of the action; without it, every duration is 0."""
    late_days: int = Field(default=1, ge=0, le=30)
    """Number of days after which a row may still arrive in a dated log; later rows are quarantined."""
    early_days: int = Field(default=0, ge=0, le=1)
    """Number of days that a row may be dated after the day of its file: 1 for files that are cut at a local
    midnight west of Greenwich."""
    missing_days: Literal["refuse", "allow"] = "refuse"
    """What a day without a file is in a dated log: refuse makes it an error, allow a day without rows (a shop that is
    closed on Sundays). Once its weekday is known, such a day must be usual to pass the check of the volume: see
    `quality.trailing_weeks`."""

    @model_validator(mode="after")
    def _each_column_once(self) -> "ActionsSource":
        single = [self.user_id.column, self.pin_id.column, *self.ts.columns]
        if self.duration_s:
            single.append(self.duration_s.column)
        for column in single:
            if single.count(column) > 1:
                raise ValueError(f"column {column!r} is mapped to two of user_id, pin_id, ts and duration_s")
        if self.ts.unit is None and self.ts.format is None and self.file_format != "parquet":
            raise ValueError(
                "`ts.unit` is missing: give s, ms, us or iso, or a `format`; only Parquet has columns of timestamps"
            )
        self.check_named(self.mapped_columns)
        return self

    @property
    def categories(self) -> list[str]:
        """Columns that only action types and surfaces are read from, sorted: they have few different values."""
        return sorted((self.action_type.columns | self.surface.columns) - self._single_columns)

    @property
    def mapped_columns(self) -> list[str]:
        """Every column that the mapping reads, sorted."""
        return sorted(self._single_columns | self.action_type.columns | self.surface.columns)

    @property
    def _single_columns(self) -> set[str]:
        """Columns that are read as ids, times and durations."""
        columns = {self.user_id.column, self.pin_id.column, *self.ts.columns}
        return columns | {self.duration_s.column} if self.duration_s else columns


class NpyVectors(Strict):
    """Pin vectors from a matrix."""

    npy: str
    """Path of the .npy matrix with one vector a row, relative to `root`."""
    ids: str
    """Path of the .npy array with the pin id of each row, relative to `root`."""


class ColumnVectors(Strict):
    """Pin vectors from a column of the catalogue. A plain string means `column`."""

    column: str
    """Name of the column with lists of numbers."""


LEARNED_KEYS = {"until", "dim", "window_actions", "min_count", "max_pins", "max_pairs"}
"""Keys of `source.pins.vectors` in site files of earlier versions, which learned vectors from the actions."""


def _described_vectors(value: Any) -> Any:
    """Refuse vectors that are to be learned; a plain string stands for `{column: string}`."""
    keys = value.keys() if isinstance(value, dict) else set()
    if value == "learned" or (LEARNED_KEYS & keys and not {"npy", "ids", "column"} & keys):
        raise ValueError(
            "vectors are no longer learned by pin_features; delete `vectors`: the model learns factors itself"
        )
    return column_shorthand(value)


def _vector_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return "npy" if "npy" in keys or "ids" in keys else "column"


VectorSource = Annotated[
    Annotated[NpyVectors, Tag("npy")] | Annotated[ColumnVectors, Tag("column")],
    Discriminator(_vector_kind),
    BeforeValidator(_described_vectors),
]


class PinsSource(Strict):
    """The pins: those of the catalogue, if the site has one, and every pin that has an action. Interests and candidates
    come from the catalogue, content vectors from one of its columns or from a matrix.

    A dated catalogue (`{ds}` in its path) adds a day's pins to the known ones, and the newest row of a pin wins. An
    undated one is read whole whenever it changes. A site without a catalogue and without vectors needs no `pins`.
    """

    pin_id: Annotated[IdField, BeforeValidator(column_shorthand)] = IdField(column="pin_id")
    """The column of the catalogue with pin ids. A site without a catalogue may leave it out: the type of its ids is
    that of `actions.pin_id`."""
    catalogue: Files | None = None
    """Files with one row a pin; without them, the pins are those that have an action or a vector."""
    vectors: VectorSource | None = None
    """Where the content vector of each pin comes from; without it, pins have none, and the presets of the paper's model
    (paper, demo, tiny) cannot be trained. A pin may have no vector: a null in the column, or no row in the matrix. A
    vector that is not finite, all zeros, or longer than 65,504 is quarantined."""
    interest: str | None = None
    """Name of the column with the interest (topic) of a pin; without it, every interest is unknown."""
    is_candidate: str | None = None
    """Name of the column that says whether a pin may be recommended; a pin outside of the catalogue may then not be.
    Its values are true or false, t or f, yes or no, y or n, 1 or 0, in small or capital letters; a row with another
    value, or with none, is quarantined. Without `is_candidate`, every pin may be recommended."""

    @model_validator(mode="after")
    def _columns_need_a_catalogue(self) -> "PinsSource":
        from_columns = [self.interest, self.is_candidate, getattr(self.vectors, "column", None)]
        if self.catalogue is None and any(from_columns):
            raise ValueError("`interest`, `is_candidate` and a vector column are read from `catalogue`: give its path")
        if self.catalogue is not None and "pin_id" not in self.model_fields_set:
            raise ValueError("`pin_id` is missing: name the column of the catalogue that has the pin ids")
        if self.catalogue is not None and isinstance(self.vectors, ColumnVectors):
            if self.catalogue.file_format == "csv":
                raise ValueError("vectors in a column need a Parquet or JSON-lines catalogue; CSV has no lists")
        elif self.catalogue is not None and self.catalogue.is_dated and self.vectors is not None:
            raise ValueError("a catalogue with {ds} in its path needs the vectors in one of its columns, or none")
        if self.catalogue is not None:
            self.catalogue.check_named(self.mapped_columns)
        return self

    @property
    def mapped_columns(self) -> list[str]:
        """Every column of the catalogue that is read."""
        vector = self.vectors.column if isinstance(self.vectors, ColumnVectors) else None
        named = (self.pin_id.column, self.interest, self.is_candidate, vector)
        return [column for column in dict.fromkeys(named) if column is not None]

    @property
    def is_incremental(self) -> bool:
        """Whether the catalogue has one set of files for each day."""
        return self.catalogue is not None and self.catalogue.is_dated


class Positive(Strict):
    """Which actions are positive engagement; the defaults are the paper's (section 3).

    Where the mapping of `actions.action_type` gives one name only (`constant`, or `values` or `rules` with one name),
    that type is positive by default, with any duration. A plain column needs `action_types`, even if all of its rows
    have the same value.
    """

    action_types: tuple[str, ...] = ("repin", "closeup", "click")
    """Types of positive actions."""
    longer_than_s: dict[str, float] = Field(default_factory=lambda: {"closeup": 10.0, "click": 10.0})
    """By action type, the duration in seconds that a positive action must exceed."""
    surfaces: tuple[str, ...] | None = ("homefeed",)
    """Surfaces of positive actions; null means all of them, which is the default where `actions.surface` is not
    given."""

    def completed(self, actions: ActionsSource) -> "Positive":
        """Replace the defaults that do not fit a log with one action type or without surfaces."""
        changes: dict[str, Any] = {}
        vocabulary = actions.action_type.vocabulary
        if vocabulary is not None and len(vocabulary) == 1 and "action_types" not in self.model_fields_set:
            changes["action_types"] = vocabulary
            if "longer_than_s" not in self.model_fields_set:
                changes["longer_than_s"] = {}
        if "surface" not in actions.model_fields_set and "surfaces" not in self.model_fields_set:
            changes["surfaces"] = None
        return self.model_copy(update=changes)

    def names_unknown_to(self, actions: ActionsSource) -> Iterator[str]:
        """Yield a sentence for each key with names that the mapping of the log never gives."""
        types, surfaces = actions.action_type.vocabulary, actions.surface.vocabulary
        for key, names, known in (
            ("action_types", self.action_types, types),
            ("longer_than_s", self.longer_than_s, types),
            ("surfaces", self.surfaces or (), surfaces),
        ):
            unknown = [name for name in names if known is not None and name not in known]
            is_default = key not in self.model_fields_set
            if unknown and not (is_default and (len(unknown) < len(names) or key == "longer_than_s")):
                field = "surface" if key == "surfaces" else "action_type"
                yield (
                    f"`positive.{key}` {'is by default' if is_default else 'names'} {', '.join(unknown)}, but "
                    f"`actions.{field}` only gives {', '.join(known or ())}"
                )


class Source(Strict):
    """A site's logs and pins."""

    root: str = "."
    """Folder that the paths below are relative to: a path relative to the site file, or s3://bucket/folder."""
    actions: ActionsSource
    """The event log."""
    pins: PinsSource = PinsSource()
    """The pins and their vectors; without it, the pins are those that have an action."""
    positive: Positive = Positive()
    """Which actions are positive engagement."""

    @model_validator(mode="after")
    def _complete(self) -> "Source":
        """Fill in what follows from the description of the log."""
        if "pin_id" not in self.pins.model_fields_set:
            object.__setattr__(self, "pins", self.pins.model_copy(update={"pin_id": self.actions.pin_id}))
        object.__setattr__(self, "positive", self.positive.completed(self.actions))
        return self

    @model_validator(mode="after")
    def _positive_actions_can_occur(self) -> "Source":
        problems = list(self.positive.names_unknown_to(self.actions))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _pin_ids_agree(self) -> "Source":
        if self.actions.pin_id.type != self.pins.pin_id.type:
            raise ValueError(
                f"pin ids are {self.actions.pin_id.type} in `actions` and {self.pins.pin_id.type} in `pins`: "
                "give both the same `type`"
            )
        return self
