"""The tables of embeddings: where they are stored, and what their manifests contain.

user_embeddings[ds] is a day's delta, user_embedding_snapshot[ds] holds every user as of the day, pin_embeddings[ds] the
candidates. All are Lance state with one version per day. A day has one model version, the same in all three tables.
"""

from typing import Any, Literal, NotRequired, TypedDict

from pf_core.config.site import Site
from pf_core.engine.daily_state import DailyState, StateManifest
from pf_core.schemas import Slices

Mode = Literal["active", "everyone"]
"""Which users a day embeds: those active on it, or everyone with a timeline."""

RECORD_ASSETS = "user_embeddings,user_embedding_snapshot"


class Norm(TypedDict):
    """Smallest, mean and largest norm of the embeddings that were written."""

    min: float
    mean: float
    max: float


# user_embeddings

UserCount = Literal[
    "users",
    "active_users",
    "active_users_with_embedding",
    "embedded",
    "reused",
    "without_actions",
    "actions",
    "padded_actions",
    "no_feature",
    "unknown_word",
]


class UserEmbeddingInputs(TypedDict):
    """What a partition is a function of; its digest changes with any of them."""

    timelines: str
    """`content_digest` of user_timelines."""
    pin_features_version: str
    model_version: str
    mode: Mode
    seen_size: int
    forgotten: str
    """Digest of the deletion list."""


class UserEmbeddingContent(TypedDict):
    """What `users.py` writes into a manifest."""

    model_version: str
    embedding_dim: int
    slices: Slices
    mode: Mode
    reason: str
    """Why this mode was chosen."""
    inputs: UserEmbeddingInputs
    digest: str
    counts: dict[UserCount, int]
    mean_vector: list[float] | None
    """Mean of the day's embeddings; None for a day without users."""
    seconds: float


class UserEmbeddingManifest(StateManifest, UserEmbeddingContent):
    """Manifest of a partition of user_embeddings."""


UserEmbeddingState = DailyState[UserEmbeddingManifest]


def embedding_state(site: Site) -> UserEmbeddingState:
    return _record_state(site, "user_embeddings")


# user_embedding_snapshot

SnapshotCount = Literal[
    "users", "new", "refreshed", "carried_over", "forgotten", "expired", "previous_users", "fragments"
]


class SnapshotInputs(TypedDict):
    """What a partition was merged from; its digest changes with any of them."""

    user_embeddings: str
    """Digest of user_embeddings of the day."""
    previous: str | None
    """Digest of the snapshot of the day before; None if nothing was taken from it."""
    forgotten: str
    """Digest of the deletion list."""


class Change(TypedDict):
    """How far a day moved the embeddings of a sample of the refreshed users."""

    sampled: int
    mean_distance: float
    cosine: dict[str, float]
    """Quantiles p05, p50 and p95 of the cosine between the old and the new embedding."""


class SnapshotSummary(TypedDict):
    """Totals over the buckets of a snapshot."""

    counts: dict[SnapshotCount, int]
    by_computed_ds: dict[str, int]
    """Number of users for each day on which embeddings were computed."""
    norm: Norm | None
    """None for a day without new embeddings."""
    change: Change | None
    """None if no refreshed user has an older embedding of the same model."""
    buckets: list[dict[str, int]]
    """Number, Lance version and counts of each bucket."""


class SnapshotContent(SnapshotSummary):
    """What `snapshot.py` writes into a manifest."""

    model_version: str
    embedding_dim: int
    slices: Slices
    built_from: Literal["everyone", "previous day"]
    inputs: SnapshotInputs
    digest: str
    seconds: float


class SnapshotManifest(StateManifest, SnapshotContent):
    """Manifest of a partition of user_embedding_snapshot."""


SnapshotState = DailyState[SnapshotManifest]


def snapshot_state(site: Site) -> SnapshotState:
    return _record_state(site, "user_embedding_snapshot")


def _record_state(site: Site, asset: Literal["user_embeddings", "user_embedding_snapshot"]) -> DailyState[Any]:
    return DailyState(
        root=site.directory / asset,
        asset=asset,
        num_buckets=site.timelines.num_buckets,
        rebuilt_by=RECORD_ASSETS,
        rebuilt_with={"everyone": True},
    )


# pin_embeddings


class PinEmbeddingInputs(TypedDict):
    """What a partition is a function of; its digest changes with any of them."""

    pin_features_version: str
    model_version: str
    pin_counts: NotRequired[str]
    """Digest of the counts of the pins as of the day; only models of parts read them."""


class PinEmbeddingContent(TypedDict):
    """What `pins.py` writes into a manifest."""

    model_version: str
    embedding_dim: int
    slices: Slices
    inputs: PinEmbeddingInputs
    digest: str
    counts: dict[Literal["pins", "clipped"], int]
    norm: Norm
    seconds: float


class PinEmbeddingManifest(StateManifest, PinEmbeddingContent):
    """Manifest of a partition of pin_embeddings."""


PinEmbeddingState = DailyState[PinEmbeddingManifest]


def pin_embedding_state(site: Site) -> PinEmbeddingState:
    return DailyState(root=site.directory / "pin_embeddings", asset="pin_embeddings", num_buckets=1)
