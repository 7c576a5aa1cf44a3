"""The feature store for many machines: Redis, one hash for each bucket; fields are ids as text, for any Redis client.

Keys contain the release, so that releases exist side by side, and no key holds more than a bucket. How durable the data
is depends on the configuration of Redis.

It is one server or a Redis Cluster, with the same keys: a command names one key and there are no transactions, so every
command goes to the node that has its key; buckets spread over the nodes by the hash of their keys. Many machines load
buckets at the same time, and putting a bucket twice changes nothing.

Only reads are pipelined: in a pipeline, a cluster's client waits for a node that hangs once for each command, one after
the other, and commands on whole buckets are long enough to be sent one by one.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisClusterException
from redis.retry import Retry

from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.serving.values import Lookup, Values, decode_values

TIMEOUT_S = 10.0

CLUSTER_RETRIES = 3
"""Number of times that a command is sent again, each time after reading from the cluster which node has the key."""

IDS_AT_ONCE = 1 << 14
"""Number of ids that are deleted together: a deletion list may be long."""

FIELDS_AT_ONCE = 512
"""Number of fields in one HSET: Redis runs no other command meanwhile."""


@dataclass(frozen=True, kw_only=True)
class RedisLocation:
    """Where the users of a release are in Redis. It can be pickled, for tasks that load buckets on other machines."""

    url: str = field(repr=False)
    """Contains the password."""
    is_cluster: bool
    prefix: str
    release: str
    num_buckets: int
    embedding_dim: int


class RedisStore:
    """Keys are `{prefix}:{release}:{bucket}`; `{prefix}:current` names the current release."""

    def __init__(self, location: RedisLocation) -> None:
        self.location = location
        self._num_buckets, self._embedding_dim = location.num_buckets, location.embedding_dim
        self._lock = threading.Lock()
        self._opened: redis.Redis | redis.RedisCluster | None = None
        try:
            self._address = redis.ConnectionPool.from_url(location.url).connection_kwargs  # does not connect
        except ValueError:  # its text may quote the password
            raise PipelineError("serving.store.url is not a Redis address such as redis://host:6379/0") from None

    @property
    def _client(self) -> redis.Redis | redis.RedisCluster:
        """The client, created when it is first used: that of a cluster connects to read the list of nodes."""
        with self._lock:
            if self._opened is None:
                timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
                if self.location.is_cluster:
                    retry = Retry(NoBackoff(), CLUSTER_RETRIES)
                    self._opened = redis.RedisCluster.from_url(self.location.url, retry=retry, **timeouts)
                else:
                    self._opened = redis.Redis.from_url(self.location.url, **timeouts)
            return self._opened

    def _key(self, bucket: int) -> str:
        return f"{self.location.prefix}:{self.location.release}:{bucket}"

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
        num_deleted = 0
        with self._errors():
            for start in range(0, len(ids), IDS_AT_ONCE):
                for bucket, (_, fields) in self._by_bucket(ids[start : start + IDS_AT_ONCE]).items():
                    num_deleted += self._client.hdel(self._key(bucket), *fields)
        return num_deleted

    def announce(self) -> None:
        with self._errors():
            self._client.set(f"{self.location.prefix}:current", self.location.release)

    def drop(self) -> None:
        with self._errors():
            for bucket in range(self._num_buckets):
                self._client.unlink(self._key(bucket))

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _by_bucket(self, ids: pa.Array) -> dict[int, tuple[list[int], list[bytes]]]:
        """Return for each bucket the positions of its ids and their fields."""
        groups: dict[int, tuple[list[int], list[bytes]]] = {}
        buckets = bucket_of(ids, self._num_buckets).tolist()
        for row, (bucket, name) in enumerate(zip(buckets, _fields(ids), strict=True)):
            rows, fields = groups.setdefault(bucket, ([], []))
            rows.append(row)
            fields.append(name)
        return groups

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of Redis into sentences. A server may quote its input: credentials and user ids are removed."""
        try:
            yield
        except (redis.RedisError, RedisClusterException) as error:
            text = str(error).rpartition("of pipeline caused error: ")[2]  # drops the command before it
            if isinstance(error, MovedError):
                text = "it is a node of a Redis Cluster: set cluster: true under serving.store in the site file"
            for secret in (self._address.get("password"), self._address.get("username")):
                text = text.replace(secret, "***") if secret else text
            kind = "Redis Cluster" if self.location.is_cluster else "Redis"
            where = self._address.get("path") or (
                f"{self._address.get('host', 'localhost')}:{self._address.get('port', 6379)}"
            )
            raise PipelineError(f"{kind} at {where} failed ({type(error).__name__}): {text}") from None


def _fields(ids: pa.Array | pa.ChunkedArray) -> list[bytes]:
    return [str(user_id).encode() for user_id in ids.to_pylist()]
