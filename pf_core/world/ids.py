"""The site's public ids: a seeded bijection of the dense indices, so that no reader can rely on density or order.

The scramble alternates keyed odd multiplication and xor-shift modulo 2^bits; each step can be inverted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pf_core.world.column_tables import Ints

USER_BITS = 53

PIN_BITS = 41

PIN_DIGITS = 8

_ALPHABET = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)


@dataclass(frozen=True, kw_only=True)
class Scramble:
    """A bijection of the integers below 2^bits."""

    seed: int
    bits: int

    def encode(self, index: NDArray[Any]) -> Ints:
        value = (index.astype(np.uint64) + self._key) & self._mask
        for multiplier in _MULTIPLIERS:
            value = (value * np.uint64(multiplier)) & self._mask
            value ^= value >> self._shift
        return value.astype(np.int64)

    def decode(self, code: NDArray[Any]) -> Ints:
        value = code.astype(np.uint64)
        for multiplier in reversed(_MULTIPLIERS):
            value ^= value >> self._shift  # its own inverse, because the shift is more than half of the bits
            value = (value * np.uint64(pow(multiplier, -1, 1 << self.bits))) & self._mask
        return ((value - self._key) & self._mask).astype(np.int64)

    @property
    def _key(self) -> np.uint64:
        return np.uint64((self.seed + 1) * 0xBF58476D1CE4E5B9 % (1 << self.bits))

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self.bits) - 1)

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(self.bits // 2 + 1)


def spell_pins(codes: Ints) -> pa.StringArray:
    """Return 'p' and eight base-36 digits for each code, built as one Arrow buffer without a Python string per row."""
    letters = np.empty((len(codes), PIN_DIGITS + 1), dtype=np.uint8)
    letters[:, 0] = ord("p")
    rest = codes.copy()
    for digit in range(PIN_DIGITS, 0, -1):
        rest, low = np.divmod(rest, 36)
        letters[:, digit] = _ALPHABET[low]
    offsets = np.arange(len(codes) + 1, dtype=np.int32) * (PIN_DIGITS + 1)
    return pa.StringArray.from_buffers(len(codes), pa.py_buffer(offsets), pa.py_buffer(letters))


def parse_pins(names: pa.Array | pa.ChunkedArray | list[str]) -> Ints:
    """Return the codes of pin ids: the inverse of `spell_pins`."""
    words = names if isinstance(names, list) else names.to_pylist()
    return np.array([int(word[1:], 36) for word in words], dtype=np.int64)
