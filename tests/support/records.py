"""The list columns of users' records, from plain Python."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pf_core.schemas import IdType, id_arrow_type


def list_columns(
    pin_id: IdType,
    *,
    memory: Sequence[Mapping[Any, float]],
    seen: Sequence[Sequence[Any]],
    is_complete: Sequence[bool],
) -> dict[str, pa.Array]:
    """Each user's increment by pin of memory, best first; seen pins, newest first; whether these are all."""
    ids = pa.list_(id_arrow_type(pin_id))
    return {
        "memory_pin_id": pa.array([list(pins) for pins in memory], ids),
        "memory_increment": pa.array([list(pins.values()) for pins in memory], pa.list_(pa.float32())),
        "seen_pin_id": pa.array([list(pins) for pins in seen], ids),
        "seen_is_complete": pa.array(list(is_complete), pa.bool_()),
    }


def empty_lists(pin_id: IdType, num_users: int) -> dict[str, pa.Array]:
    """No memory, and nothing seen."""
    return list_columns(pin_id, memory=[{}] * num_users, seen=[[]] * num_users, is_complete=[True] * num_users)
