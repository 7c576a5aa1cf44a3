"""The site file's `serving` section: how users are embedded, indexed and released, and when a model is promoted."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pf_core.config.base import Strict
from pf_core.config.cron import cron_text

StoreKind = Literal["lmdb", "redis"]

Frequency = Literal["once", "daily", "realtime"]
"""How often a user's embedding is recomputed in the days after the cut (section 4.2.2)."""


class IndexConfig(Strict):
    """The HNSW index of pins (section 3.6). `ef` is no setting: it is tuned until the index reaches target_recall."""

    links: int = Field(default=16, ge=2)
    """Number of links of a pin in the graph (hnswlib's M). More find more, and take more memory."""
    ef_construction: int = Field(default=200, ge=10)
    """Number of candidates that hnswlib examines when it links a pin. More build a better graph, more slowly."""
    num_shards: int = Field(default=1, ge=1, le=4096)
    """Number of graphs that the pins are divided into by hash of the pin id, so that each fits into one worker's
    memory."""
    target_recall: float = Field(default=0.95, gt=0, le=1)
    """Share of the 10 nearest pins by exact search that the index must find."""
    max_ef: int = Field(default=2048, ge=10)
    """Largest number of candidates of a search (hnswlib's ef) that tuning tries."""
    max_exact_pins: int = Field(default=1_000_000, ge=0)
    """Largest number of pins at which every search scores all of them, where the graph does not reach `target_recall`:
    of many pins with nearly the same vector it finds only some. With more pins, nothing is released then."""
    sample_users: int = Field(default=1000, ge=1)
    """Number of users of the snapshot whose searches measure the recall of the index."""
    retention_days: int = Field(default=3, ge=1)
    """Number of days whose index is kept; a release keeps its own copy."""


class StoreConfig(Strict):
    """The key-value store in which services look users up. Credentials belong into `url` as `${NAME}`; they are never
    written to a file."""

    kind: StoreKind = "lmdb"
    """lmdb is a file in the release, read by services on the same machine or disk; redis is a server."""
    url: str | None = Field(default=None, repr=False)
    """Address of the Redis server, such as redis://:${REDIS_PASSWORD}@host:6379/0; only for redis."""
    cluster: bool = False
    """Whether the server is a Redis Cluster: then `url` is that of any of its nodes, which knows the others."""
    key_prefix: str = "pinnerformer"
    """First part of every key in Redis, followed by the site's name."""

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> "StoreConfig":
        if self.kind != "redis" and self.cluster:
            raise ValueError("cluster is a setting of kind: redis")
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind: redis needs a url, such as redis://localhost:6379/0")
        return self


class PromotionConfig(Strict):
    """When a candidate model becomes champion: it may lose at most a share of the champion's metrics."""

    first: Literal["always", "only_if_better"] = "always"
    """What happens with the first model: always promote it, or only if it beats the baselines in the question of
    all positives."""
    recall_tolerance: float = Field(default=0.02, ge=0, le=1)
    """Share of the champion's recall that a candidate may lose. A larger loss that chance explains, by the 95 %
    interval of the difference over users, does not count."""
    coverage_tolerance: float = Field(default=0.5, ge=0, le=1)
    """Share of the champion's P90 coverage that a candidate may lose."""
    num_pins: int = Field(default=1_000_000, ge=100)
    """Number of random candidate pins in the index of the evaluation; all of them if there are fewer."""
    num_users: int = Field(default=10_000, ge=1)
    """Number of held-out users that models are evaluated on; all of them if there are fewer."""
    frequencies: tuple[Frequency, ...] = ("once", "daily", "realtime")
    """How often embeddings are recomputed in the evaluation: once, daily or realtime. The promotion depends on
    `once`; the others are only reported."""

    @model_validator(mode="after")
    def _once_decides(self) -> "PromotionConfig":
        if "once" not in self.frequencies:
            raise ValueError("frequencies must contain once: it decides about a promotion")
        return self


class ServingQuality(Strict):
    """Limits beyond which a day's embeddings are abnormal."""

    min_active_coverage: float = Field(default=0.9, ge=0, le=1)
    """Least share of the day's active users (of all users on a day on which all are embedded) who must have an
    embedding; below it, nothing is published."""
    max_mean_drift: float = Field(default=0.2, ge=0)
    """Largest distance between the mean of the day's embeddings and that of the days before; above it, a warning."""
    max_change_ratio: float = Field(default=2.0, gt=0)
    """Largest ratio of how far users moved on the day to the median of the days before; above it, a warning."""
    trailing_days: int = Field(default=14, ge=1)
    """Number of days before that a day is compared with."""


class ServingConfig(Strict):
    """How users are embedded, indexed and released, and when the schedules run."""

    retention_days: int = Field(default=30, ge=2)
    """Number of days of embeddings and snapshots that stay readable; older ones are removed. At least
    source.actions.late_days + 2."""
    compact_after_fragments: int = Field(default=24, ge=2)
    """Number of Lance fragments of a bucket beyond which small ones are merged: more cost readers time, fewer cost
    the daily merge time."""
    seen_size: int = Field(default=256, ge=0, le=65_535)
    """Largest number of seen pins in a user's record, the newest distinct ones, which `recommend(new_only=True)` leaves
    out. Each takes 8 bytes, or the length of its text and 4."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where users and pins are embedded; auto is a GPU if there is one."""
    keep_releases: int = Field(default=3, ge=2)
    """Number of releases that are kept: the current one, and those that `pf rollback` can go back to."""
    index: IndexConfig = IndexConfig()
    """The HNSW index of pins."""
    store: StoreConfig = StoreConfig()
    """The key-value store of users."""
    promotion: PromotionConfig = PromotionConfig()
    """When a candidate model becomes champion."""
    quality: ServingQuality = ServingQuality()
    """Limits beyond which a day's embeddings are abnormal."""
    daily_cron: Annotated[str, BeforeValidator(cron_text)] = "0 2 * * *"
    """When the daily schedule runs, as a cron expression in UTC: the logs of the day before must be complete."""
    training_cron: Annotated[str, BeforeValidator(cron_text)] = "0 6 * * 1"
    """When the training schedule runs, as a cron expression in UTC."""
