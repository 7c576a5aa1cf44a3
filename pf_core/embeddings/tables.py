"""The tables of the serving path: where they lie, what holds of every row, and what a day is made of.

user_embeddings[ds] is a day's delta, user_embedding_snapshot[ds] everybody as of the day, pin_embeddings[ds] the
candidates: all are Lance state, a version a day. Every day has one model version, the same in all three.
"""

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.engine.daily_state import DailyState


def embedding_state(site: Site) -> DailyState:
    return DailyState(
        root=site.directory / "user_embeddings", asset="user_embeddings", num_buckets=site.timelines.num_buckets
    )


def snapshot_state(site: Site) -> DailyState:
    name = "user_embedding_snapshot"
    return DailyState(root=site.directory / name, asset=name, num_buckets=site.timelines.num_buckets)


def pin_embedding_state(site: Site) -> DailyState:
    return DailyState(root=site.directory / "pin_embeddings", asset="pin_embeddings", num_buckets=1)


def gap_error(asset: str, state: DailyState, ds: str) -> str:
    """The sentence for a day whose day before is missing, with the command that builds what is missing."""
    built = [day for day in state.days() if day < ds]
    first = shift_ds(built[-1], 1) if built else ds
    return (
        f"{asset} {ds} builds on {shift_ds(ds, -1)}, which is missing. Build the gap with: dagster asset materialize "
        f"--select {asset} --partition-range {first}...{ds} -m pf_assets.definitions"
    )
