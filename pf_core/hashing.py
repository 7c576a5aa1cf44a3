"""Hash functions: a user's bucket, which users are held out, random numbers by key, digests of inputs.

SplitMix64 and BLAKE2b give the same numbers on every machine and in every version; buckets and samples rely on it.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Keys = NDArray[np.uint64]


GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(bits: Keys) -> Keys:
    """The finalizer of SplitMix64: a bijection of 64-bit numbers in which every input bit affects all output bits."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def mixed(key: Keys | int, counter: Ints | Keys | int) -> Keys:
    """Random 64 bits for each (key, counter), broadcast: SplitMix64. The result can be used as a key."""
    with np.errstate(over="ignore"):
        step = (np.asarray(counter).astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA
        return splitmix64(np.asarray(key).astype(np.uint64) + step)


def uniform(bits: Keys) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(bound: Ints | int, bits: Keys) -> Ints:
    """Uniform integers in [0, bound); 0 where the bound is 0."""
    return (uniform(bits) * bound).astype(np.int64)


def permuted(index: Ints, size: int, key: int) -> Ints:
    """Return the place of `index` in a random order of range(size), without the memory for that order.

    A Feistel network on two digits to the base of about the square root of size. It permutes slightly more than
    range(size); what falls outside is sent through again until it falls inside.
    """
    base = np.uint64(np.ceil(np.sqrt(size)))
    result = index.astype(np.uint64)
    pending = np.arange(len(index))
    while len(pending):
        left, right = np.divmod(result[pending], base)
        for turn in range(10):
            left, right = right, (left + mixed(mixed(key, turn), right) % base) % base
        result[pending] = left * base + right
        pending = pending[result[pending] >= size]
    return result.astype(np.int64)


def bucket_of(user_id: pa.Array | pa.ChunkedArray, num_buckets: int) -> np.ndarray:
    """The bucket of each user: splitmix64 of an int64, the first 8 bytes of BLAKE2b of a string's UTF-8.

    Part of the data contract: it decides where a user's rows are stored, so it never changes.
    """
    if pa.types.is_integer(user_id.type):
        with np.errstate(over="ignore"):
            hashed = splitmix64(user_id.to_numpy().astype(np.uint64) + GOLDEN_GAMMA)
        return (hashed % np.uint64(num_buckets)).astype(np.uint16)
    encoded = combined(user_id).dictionary_encode()
    hashes = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % num_buckets
        for text in encoded.dictionary.to_pylist()
    ]
    return np.array(hashes, np.uint16)[encoded.indices.to_numpy()]


def combined(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The array in one chunk."""
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


HASH_PRIME = 65_521
"""Number of hash values of `hashed_uniform`; it has no common divisor with HASH_SHARES."""


def hashed_uniform(user_ids: pa.Array, key: int) -> np.ndarray:
    """Return a number in [0, 1) for each user, by hash of the id and the key; independent of `is_held_out`."""
    return uniform(mixed(key, bucket_of(user_ids, HASH_PRIME).astype(np.int64)))


HASH_SHARES = 10_000
"""Resolution of `is_held_out`: a share is rounded to ten-thousandths."""


def is_held_out(user_ids: pa.Array, share: float) -> np.ndarray:
    """Return which users training never sees: by hash of the id, so that a user is held out of every set or of none."""
    return bucket_of(user_ids, HASH_SHARES) < round(share * HASH_SHARES)


def digest_of(inputs: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def hash_slices(values: np.ndarray, byte_offsets: np.ndarray) -> np.ndarray:
    """8 bytes of BLAKE2b of each slice of an array's bytes, as int64."""
    data = values.reshape(-1).view(np.uint8).data
    slices = (data[start:end] for start, end in itertools.pairwise(byte_offsets.tolist()))
    return np.frombuffer(b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in slices), "<i8")
