"""Which actions are positive engagement (paper, section 3)."""

import numpy as np
import pyarrow as pa

from pf_core.config.source import Positive


def positive_mask(actions: pa.Table, positive: Positive) -> np.ndarray:
    """Which rows are positive engagement (paper, section 3): type, surface, and longer than the type's bound."""
    types, type_code = _decode(actions["action_type"])
    surfaces, surface_code = _decode(actions["surface"])
    bound_s = [positive.longer_than_s.get(name, -1.0) if name in positive.action_types else np.inf for name in types]
    is_place = [positive.surfaces is None or name in positive.surfaces for name in surfaces]
    long_enough = actions["duration_s"].to_numpy() > np.array(bound_s, np.float32)[type_code]
    return long_enough & np.array(is_place, bool)[surface_code]


def _decode(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
