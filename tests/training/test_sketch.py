import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pf_core.training.sketch import CountMinSketch


def sketch_of(keys: list[int] | np.ndarray, *, depth: int = 4, width: int = 1 << 12) -> CountMinSketch:
    sketch = CountMinSketch(depth=depth, width=width)
    sketch.add(torch.as_tensor(np.array(keys, dtype=np.int64)))
    return sketch


def test_a_few_keys_are_counted_exactly() -> None:
    sketch = sketch_of([7, 7, 7, 9, 11, 11])
    assert sketch.count(torch.tensor([7, 9, 11, 12])).tolist() == [3, 1, 2, 0]
    torch.testing.assert_close(sketch.share(torch.tensor([7, 9, 11, 12])), torch.tensor([3 / 6, 1 / 6, 2 / 6, 0]))
    assert int(sketch.total) == 6
    assert sketch.counts.sum(dim=1).tolist() == [6] * 4  # each row holds every key once


def test_an_empty_sketch_has_no_shares() -> None:
    sketch = CountMinSketch(depth=2, width=16)
    assert sketch.share(torch.tensor([1, 2])).tolist() == [0, 0]
    sketch.add(torch.zeros(0, dtype=torch.int64))
    assert int(sketch.total) == 0
    assert sketch.count(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("keys", ["dense", "hashed", "strided"])
@pytest.mark.parametrize(("depth", "width"), [(1, 256), (2, 512), (4, 1024)])
def test_the_error_bound_holds(keys: str, depth: int, width: int) -> None:
    rng = np.random.default_rng(5)
    rank = np.minimum(rng.zipf(1.3, 40_000), 6000)
    names = {
        "dense": np.arange(6001),  # what the training set has: row numbers
        "hashed": rng.integers(-(2**63), 2**63 - 1, 6001),
        "strided": np.arange(6001) * (1 << 40),  # only high bits differ
    }[keys]
    stream = names[rank]
    sketch, exact = sketch_of(stream, depth=depth, width=width), Counter(stream.tolist())
    estimate = sketch.count(torch.from_numpy(names)).numpy()
    error = estimate - np.array([exact[int(name)] for name in names])
    assert error.min() >= 0
    bound = 2 * math.e / width * len(stream)
    assert (error > bound).mean() <= math.exp(-depth)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60))
def test_any_int64_is_a_key_and_never_counts_too_little(keys: list[int]) -> None:
    sketch, exact = sketch_of(keys, width=1 << 16), Counter(keys)
    for key, count in exact.items():
        assert count <= int(sketch.count(torch.tensor([key]))) <= len(keys)


def test_extreme_keys_are_told_apart() -> None:
    keys = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62, -(2**62)]
    repeated = [key for times, key in enumerate(keys, start=1) for _ in range(times)]
    assert sketch_of(repeated).count(torch.tensor(keys)).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_order_and_batches_do_not_matter_and_two_sketches_agree() -> None:
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 500, 2000)
    whole, parts = sketch_of(stream, width=64), CountMinSketch(depth=4, width=64)
    for part in np.array_split(rng.permutation(stream), 7):
        parts.add(torch.from_numpy(part))
    assert torch.equal(whole.counts, parts.counts)
    assert torch.equal(whole.total, parts.total)
    assert torch.equal(whole.multiplier, parts.multiplier)


def test_shares_sum_to_one_when_nothing_collides() -> None:
    rng = np.random.default_rng(1)
    sketch = sketch_of(rng.integers(0, 50, 3000), width=1 << 16)
    assert float(sketch.share(torch.arange(50)).sum()) == pytest.approx(1, abs=1e-5)


def test_rows_hash_independently() -> None:
    """Two keys that share a cell in one row hardly ever share one in all rows: that is what the depth is for."""
    cells = CountMinSketch(depth=4, width=256)._cells(torch.arange(2000))
    shared = [(row[:, None] == row).sum() - 2000 for row in cells]
    everywhere = (cells[:, :, None] == cells[:, None, :]).all(dim=0).sum() - 2000
    assert all(int(count) <= 2 * 2000 * 1999 / 256 for count in shared)  # nearly universal: 2 / width
    assert int(everywhere) <= 20


def test_the_state_travels_in_a_checkpoint() -> None:
    sketch, copy = sketch_of([1, 1, 5], width=64), CountMinSketch(depth=4, width=64)
    copy.load_state_dict(sketch.state_dict())
    assert copy.count(torch.tensor([1, 5])).tolist() == [2, 1]
    assert int(copy.total) == 3
