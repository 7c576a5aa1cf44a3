"""Every table that crosses a boundary, in one place: column names, Arrow schemas, closed vocabularies.

Ids are int64 or strings, as in the log; nothing assumes that they are dense or ordered. Times are UTC microseconds.
Action types and surfaces are dictionary-encoded strings: compact as codes, readable as text.
"""

from typing import Literal

import pyarrow as pa

IdType = Literal["int", "string"]

Slices = dict[str, list[int]]
"""Parts of a vector by name, each as [start, end]."""

TIMESTAMP = pa.timestamp("us", tz="UTC")

CATEGORY = pa.dictionary(pa.int16(), pa.string())

ACTION_COLUMNS = ("user_id", "ts", "pin_id", "action_type", "surface", "duration_s")
"""Sort order of raw_actions: a user's actions by time; ties broken by every other field, so that two builds agree."""

TIMELINE_LISTS = ("pin_id", "ts", "action_type", "surface", "duration_s")
"""List columns of a timeline: one value for each action."""


def id_arrow_type(id_type: IdType) -> pa.DataType:
    """Arrow type of the ids of users or pins."""
    return pa.int64() if id_type == "int" else pa.string()


def raw_actions_schema(user_id: IdType, pin_id: IdType) -> pa.Schema:
    """One row for each action."""
    return pa.schema(
        [
            pa.field("user_id", id_arrow_type(user_id)),
            pa.field("ts", TIMESTAMP),
            pa.field("pin_id", id_arrow_type(pin_id)),
            pa.field("action_type", CATEGORY),
            pa.field("surface", CATEGORY),
            pa.field("duration_s", pa.float32()),
        ]
    )


ANSWER = "answer"
"""Column of the answers, and of actions on their way into a partition: whether the user may be learned from."""


def answers_schema(user_id: IdType) -> pa.Schema:
    """One row for each user with an action on a day: the answer of the user's newest row of the day."""
    return pa.schema([pa.field("user_id", id_arrow_type(user_id)), pa.field(ANSWER, pa.bool_())])


QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("source_file", pa.string()),
        pa.field("row_number", pa.int64()),  # 1-based; a CSV's header is row 1
        pa.field("reason", pa.string()),
        pa.field("raw", pa.string()),  # the row as JSON, or the unparsed line
    ]
)


def user_timelines_schema(user_id: IdType, pin_id: IdType) -> pa.Schema:
    """One row for each user, as timelines are read; `timelines/segments.py` describes how they are stored."""
    return pa.schema(
        [
            pa.field("user_id", id_arrow_type(user_id)),
            pa.field("pin_id", pa.list_(id_arrow_type(pin_id))),
            pa.field("ts", pa.list_(TIMESTAMP)),
            pa.field("action_type", pa.list_(CATEGORY)),
            pa.field("surface", pa.list_(CATEGORY)),
            pa.field("duration_s", pa.list_(pa.float32())),
        ]
    )


def pin_features_schema(pin_id: IdType, dim: int) -> pa.Schema:
    """One row for each pin: what is known of it. Without any content vector (`dim` 0) there is no column `feature`."""
    return pa.schema(
        [
            pa.field("pin_id", id_arrow_type(pin_id)),
            *([pa.field("feature", pa.list_(pa.float32(), dim))] if dim else []),  # null: the pin has no vector
            pa.field("interest", pa.string()),
            pa.field("is_candidate", pa.bool_()),
            pa.field("has_feature", pa.bool_()),  # readable without the vectors
        ]
    )


def user_embeddings_schema(user_id: IdType, pin_id: IdType, dim: int) -> pa.Schema:
    """One row for each user, the user's record, in the snapshot and in a day's user_embeddings.

    The score of a pin for a user is the cosine of their embeddings, plus memory_increment if the pin is in memory.
    """
    return pa.schema(
        [
            pa.field("user_id", id_arrow_type(user_id)),
            pa.field("embedding", pa.list_(pa.float16(), dim)),  # unit norm
            pa.field("model_version", pa.string()),
            pa.field("computed_ds", pa.date32()),
            pa.field("last_action_ts", TIMESTAMP),
            pa.field("num_actions", pa.int32()),  # number of actions that the embedding was computed from
            pa.field("memory_pin_id", pa.list_(id_arrow_type(pin_id))),  # best first; empty for a model without memory
            pa.field("memory_increment", pa.list_(pa.float32())),  # one for each pin of memory_pin_id
            pa.field("seen_pin_id", pa.list_(id_arrow_type(pin_id))),  # distinct, newest first, at most seen_size
            pa.field("seen_is_complete", pa.bool_()),  # whether seen_pin_id has every pin of the user's timeline
        ]
    )


INPUT_HASH = pa.field("input_hash", pa.int64())
"""Column of user_embeddings only: hash of all that the record is computed from. The same hash means the same record of
the same model."""


def pin_embeddings_schema(pin_id: IdType, dim: int) -> pa.Schema:
    """One row for each candidate pin: the model's output."""
    return pa.schema(
        [
            pa.field("pin_id", id_arrow_type(pin_id)),
            pa.field("embedding", pa.list_(pa.float16(), dim)),  # unit norm
            pa.field("model_version", pa.string()),
            pa.field("interest", pa.string()),  # shown by serving
        ]
    )
