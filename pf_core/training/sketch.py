"""Frequency of each pin among the positives, in fixed memory: a count-min sketch on the device (section 3.3.2).

`depth` rows of `width` counters. Adding a pin increments one counter of each row, chosen by a multiply-shift hash; the
estimate is the smallest of these counters. It is never too low, and too high by more than 2e/width of the total only
with probability e^-depth (the factor 2 is for multiply-shift, which is only nearly universal).
"""

import torch
from torch import Tensor, nn

MULTIPLIERS_SEED = 0x5EED


class CountMinSketch(nn.Module):
    """Counts int64 keys; `counts` and `total` are part of a checkpoint."""

    counts: Tensor
    total: Tensor
    """Number of keys added."""
    multiplier: Tensor
    offset: Tensor

    def __init__(self, *, depth: int, width: int) -> None:
        super().__init__()
        assert width & (width - 1) == 0, "a power of two: the hash keeps whole bits"
        generator = torch.Generator().manual_seed(MULTIPLIERS_SEED)
        numbers = torch.randint(-(2**63), 2**63 - 1, (2, depth, 1), generator=generator)
        self.width = width
        self.register_buffer("multiplier", numbers[0] | 1, persistent=False)
        self.register_buffer("offset", numbers[1], persistent=False)
        self.register_buffer("counts", torch.zeros(depth, width, dtype=torch.int64))
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def add(self, key_N: Tensor) -> None:
        cells = self._cells(key_N)
        self.counts.scatter_add_(1, cells, torch.ones_like(cells))
        self.total += len(key_N)

    def share(self, key_N: Tensor) -> Tensor:
        """Return the estimated share of each key among all keys added, float32; 0 for an empty sketch."""
        return self.count(key_N).float() / self.total.clamp(min=1)

    def count(self, key_N: Tensor) -> Tensor:
        """Return the estimated number of times that each key was added."""
        return self.counts.gather(1, self._cells(key_N)).amin(dim=0)

    def _cells(self, key_N: Tensor) -> Tensor:
        bits = self.width.bit_length() - 1
        mixed = self.multiplier * key_N + self.offset  # wraps around, as multiply-shift wants
        return (mixed >> (64 - bits)) & (self.width - 1)
