"""The feature store for many machines: Redis, one hash a bucket, fields are ids as text, so that any client reads it.

Keys carry the release, so that two releases live side by side, and none holds more than a bucket. What is durable there
is up to Redis's own configuration. (A client of one server: a cluster would need its own client, with the same keys.)

Whoever has a bucket may put it: many machines load at once, and putting twice changes nothing.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import redis

from pf_core.contracts import PipelineError
from pf_core.shuffle import bucket_of
from pf_core.store import Lookup, Values, decode_values

TIMEOUT_S = 10.0
FIELDS_AT_ONCE = 512
"""Of one HSET: Redis serves nobody else while it runs one."""


class RedisStore:
    """Keys are `{prefix}:{release}:{bucket}`; `{prefix}:current` names the release that the pointer names."""

    def __init__(self, url: str, *, prefix: str, release: str, num_buckets: int, embedding_dim: int) -> None:
        self._prefix, self._release = prefix, release
        self._num_buckets, self._embedding_dim = num_buckets, embedding_dim
        try:
            self._client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        except ValueError:  # its text may quote the password
            raise PipelineError("serving.store.url is not a Redis address such as redis://host:6379/0") from None

    def _key(self, bucket: int) -> str:
        return f"{self._prefix}:{self._release}:{bucket}"

    def put(self, bucket: int, rows: pa.Table) -> None:
        """Add a bucket's rows of the snapshot."""
        fields, values = _fields(rows["user_id"]), Values(rows)
        with self._errors():
            for start in range(0, rows.num_rows, FIELDS_AT_ONCE):
                taken = np.arange(start, min(start + FIELDS_AT_ONCE, rows.num_rows))
                pairs = zip(fields[start : start + FIELDS_AT_ONCE], values.take(taken), strict=True)
                self._client.hset(self._key(bucket), mapping=dict(pairs))

    def count(self) -> int:
        with self._errors():
            return sum(self._client.hlen(self._key(bucket)) for bucket in range(self._num_buckets))

    def get(self, ids: pa.Array) -> Lookup:
        values: list[bytes | None] = [None] * len(ids)
        groups = self._by_bucket(ids)
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for bucket, (_, fields) in groups.items():
                pipeline.hmget(self._key(bucket), fields)
            for (rows, _), answers in zip(groups.values(), pipeline.execute(), strict=True):
                for row, value in zip(rows, answers, strict=True):
                    values[row] = value
        return decode_values(values, self._embedding_dim)

    def delete(self, ids: pa.Array) -> int:
        groups = self._by_bucket(ids)
        with self._errors():
            return sum(self._client.hdel(self._key(bucket), *fields) for bucket, (_, fields) in groups.items())

    def announce(self) -> None:
        with self._errors():
            self._client.set(f"{self._prefix}:current", self._release)

    def drop(self) -> None:
        with self._errors():
            for bucket in range(self._num_buckets):
                self._client.unlink(self._key(bucket))

    def close(self) -> None:
        self._client.close()

    def _by_bucket(self, ids: pa.Array) -> dict[int, tuple[list[int], list[bytes]]]:
        """Bucket → (positions among the ids, their fields)."""
        groups: dict[int, tuple[list[int], list[bytes]]] = {}
        buckets = bucket_of(ids, self._num_buckets).tolist()
        for row, (bucket, field) in enumerate(zip(buckets, _fields(ids), strict=True)):
            rows, fields = groups.setdefault(bucket, ([], []))
            rows.append(row)
            fields.append(field)
        return groups

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """A server may quote what it was sent: nothing of the credentials goes on from here."""
        try:
            yield
        except redis.RedisError as error:
            text, options = str(error), self._client.get_connection_kwargs()
            for secret in (options.get("password"), options.get("username")):
                text = text.replace(secret, "***") if secret else text
            where = options.get("path") or f"{options.get('host')}:{options.get('port')}"
            raise PipelineError(f"Redis at {where} failed ({type(error).__name__}): {text}") from None


def _fields(ids: pa.Array | pa.ChunkedArray) -> list[bytes]:
    return [str(user_id).encode() for user_id in ids.to_pylist()]
