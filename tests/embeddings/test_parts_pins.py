"""What decides the pins that a model of parts embeds on a day."""

import numpy as np
import pyarrow as pa
import pytest

from pf_core.embeddings.parts_pins import counts_digest
from pf_core.pins.counts import PinCounts


def counts_of(ids: pa.Array, *, user_days: int = 3, first: int = 20_000) -> PinCounts:
    user_days_NW = np.tile(np.array([0, 0, user_days, 3, 3]), (len(ids), 1))
    return PinCounts(ids=ids, user_days_NW=user_days_NW, first_day_N=np.full(len(ids), first, np.int32))


@pytest.mark.parametrize("ids", [pa.array([1, 5]), pa.array(["a", "bc"])])
def test_the_digest_covers_counts_and_day(ids: pa.Array) -> None:
    """After a week without actions the counts of two days are equal, but pins are older on the second."""
    one = counts_digest(counts_of(ids), "2026-01-10")
    assert one == counts_digest(counts_of(pa.concat_arrays([ids])), "2026-01-10")
    assert one != counts_digest(counts_of(ids), "2026-01-11")
    assert one != counts_digest(counts_of(ids, user_days=2), "2026-01-10")
    assert one != counts_digest(counts_of(ids, first=20_001), "2026-01-10")
    assert one != counts_digest(counts_of(ids[:1]), "2026-01-10")
