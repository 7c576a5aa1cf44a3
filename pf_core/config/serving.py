"""What a site file says about serving: how users are embedded, indexed and released, and when a model is promoted."""

from typing import Literal

from pydantic import Field, model_validator

from pf_core.config.base import Strict

StoreKind = Literal["lmdb", "redis"]

Frequency = Literal["once", "daily", "realtime"]
"""How often a user's embedding is made anew in the days after the cut (section 4.2.2)."""


class IndexConfig(Strict):
    """HNSW (paper, section 3.6). `ef` is not here: it is tuned until the index finds what exact search finds."""

    links: int = Field(default=16, ge=2)
    """hnswlib's M: links of a pin in the graph."""
    ef_construction: int = Field(default=200, ge=10)
    num_shards: int = Field(default=1, ge=1, le=4096)
    target_recall: float = Field(default=0.95, gt=0, le=1)
    """Of the 10 nearest pins by exact search, the share that the index finds; below it, nothing is released."""
    max_ef: int = Field(default=2048, ge=10)
    sample_users: int = Field(default=1000, ge=1)
    """Users of the snapshot by whom the index is judged."""
    retention_days: int = Field(default=3, ge=1)
    """Days whose index is kept; a release has its own."""


class StoreConfig(Strict):
    """Where services look users up. Redis's credentials belong into `url` by `${NAME}`; they are never written down."""

    kind: StoreKind = "lmdb"
    url: str | None = Field(default=None, repr=False)
    cluster: bool = False
    """A Redis Cluster: `url` is that of any of its nodes, or a name that stands for several; it tells the others."""
    key_prefix: str = "pinnerformer"

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> "StoreConfig":
        if self.kind != "redis" and self.cluster:
            raise ValueError("cluster is a setting of kind: redis")
        if self.kind == "redis" and self.url is None:
            raise ValueError("kind: redis needs a url, such as redis://localhost:6379/0")
        return self


class PromotionConfig(Strict):
    """When a candidate becomes champion: it may lose this share of the champion's metric, and no more."""

    recall_tolerance: float = Field(default=0.02, ge=0, le=1)
    """A larger loss that chance explains, by the 95 % interval of the difference over users, does not count."""
    coverage_tolerance: float = Field(default=0.5, ge=0, le=1)
    num_pins: int = Field(default=1_000_000, ge=100)
    """Random candidates that form the index of the evaluation; all of them if there are fewer."""
    num_users: int = Field(default=10_000, ge=1)
    """Held-out users by whom models are judged; all of them if there are fewer."""
    frequencies: tuple[Frequency, ...] = ("once", "daily", "realtime")
    """How often embeddings are made anew in the evaluation; once decides, the others are shown."""

    @model_validator(mode="after")
    def _once_decides(self) -> "PromotionConfig":
        if "once" not in self.frequencies:
            raise ValueError("frequencies must contain once: it decides about a promotion")
        return self


class ServingQuality(Strict):
    """When a day's embeddings are abnormal."""

    min_active_coverage: float = Field(default=0.9, ge=0, le=1)
    """Share of the active users (of everybody, when all are embedded) who get one; below it, nothing is published."""
    max_mean_drift: float = Field(default=0.2, ge=0)
    """Distance of the mean of the day's embeddings from that of the days before; above it, a warning."""
    max_change_ratio: float = Field(default=2.0, gt=0)
    """How far users move, against the median of the days before; above it, a warning."""
    trailing_days: int = Field(default=14, ge=1)


class ServingConfig(Strict):
    retention_days: int = Field(default=30, ge=2)
    """Days of embeddings and snapshots that stay readable."""
    compact_after_fragments: int = Field(default=24, ge=2)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where users and pins are embedded; auto is a GPU if there is one."""
    keep_releases: int = Field(default=3, ge=2)
    """The current one, and those that a rollback can go back to."""
    index: IndexConfig = IndexConfig()
    store: StoreConfig = StoreConfig()
    promotion: PromotionConfig = PromotionConfig()
    quality: ServingQuality = ServingQuality()
    daily_cron: str = "0 2 * * *"
    """When the day before is complete, in UTC."""
    training_cron: str = "0 6 * * 1"
