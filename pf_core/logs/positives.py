"""Positive engagement (paper, section 3): the actions that training predicts and evaluation counts as hits.

Which actions are positive is configuration: `source.positive` in the site file.
"""

import numpy as np
import pyarrow as pa

from pf_core.config.source import Positive


def positive_mask(actions: pa.Table, positive: Positive) -> np.ndarray:
    """Return which rows are positive: action type and surface are listed, and duration_s > longer_than_s of the type.

    A type without a bound is positive with any duration, also 0.
    """
    types, type_code = _decode(actions["action_type"])
    surfaces, surface_code = _decode(actions["surface"])
    bound_s = [positive.longer_than_s.get(name, -1.0) if name in positive.action_types else np.inf for name in types]
    is_surface = [positive.surfaces is None or name in positive.surfaces for name in surfaces]
    long_enough = actions["duration_s"].to_numpy() > np.array(bound_s, np.float32)[type_code]
    return long_enough & np.array(is_surface, bool)[surface_code]


def _decode(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Return the distinct values of a column, and the index of each row's value among them."""
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
