"""A small site for the daily path: users who come and go, pins of four interests, and a registered model.

The model is the tiny preset with random weights: what is tested is that vectors arrive, not that they are good.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pf_assets.definitions import build_definitions
from pf_assets.schedules import DAILY_ASSETS
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.config.training import tiny
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.embeddings.tables import snapshot_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.model.checkpoint import save_model
from pf_core.model.towers import PinnerFormer
from pf_core.serving.client import Serving
from pf_core.serving.index import PinIndex
from pf_core.training.plan import models_dir
from tests.support import sites
from tests.support.registry import promote_first
from tests.support.shared import SharedSites
from tests.support.sites import START

NUM_USERS, NUM_PINS, NUM_INTERESTS, FEATURE_DIM = 60, 80, 4, 8
Rows = dict[str, list[Any]]


def day_of_logs(ds: str, *, seed: int = 0) -> Rows:
    """About a third of the users come, each for a few actions; one in ten actions arrives on the day after."""
    rng = np.random.default_rng([seed, ds_start_us(ds) // 86_400_000_000])
    user = np.repeat(np.flatnonzero(rng.random(NUM_USERS) < 0.35), 4)
    second = np.sort(rng.integers(86_400, size=len(user)))
    pin = rng.integers(NUM_PINS // NUM_INTERESTS, size=len(user)) * NUM_INTERESTS + user % NUM_INTERESTS
    return {
        "user": user.tolist(),
        "pin": [f"p{number}" for number in pin],
        "time_us": (ds_start_us(ds) + second * 1_000_000).tolist(),
        "event": rng.choice(["save", "look", "go"], len(user)).tolist(),
        "place": rng.choice(["home", "find"], len(user), p=[0.8, 0.2]).tolist(),
        "dwell_s": rng.exponential(20, len(user)).tolist(),
    }


def write_logs(root: Path, days: list[str], *, poison: tuple[str, Callable[[Rows], Rows]] | None = None) -> None:
    """Files by day of arrival; `poison` spoils what arrives on one day."""
    late: Rows = {}
    for ds in days:
        rows = day_of_logs(ds)
        is_late = [number % 10 == 9 for number in range(len(rows["user"]))]
        arrived = {name: late.get(name, []) + _where(values, is_late, False) for name, values in rows.items()}
        late = {name: _where(values, is_late, True) for name, values in rows.items()}
        if poison is not None and poison[0] == ds:
            arrived = poison[1](arrived)
        (root / "logs").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(arrived), root / "logs" / f"{ds}.parquet")


def _where(values: list[Any], flags: list[bool], wanted: bool) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag == wanted]


def make_daily_site(root: Path, *, last: str, serving: dict[str, Any] | None = None, **options: Any) -> Site:
    """Logs and catalogue from START to `last`; nothing is materialized."""
    quality = {"min_volume_ratio": 0.0, "max_volume_ratio": 100.0}
    served: dict[str, Any] = {"index": {"sample_users": 20}, "keep_releases": 3} | (serving or {})
    site = sites.make_site(root, **{"end_ds": last, "quality": quality, "late_days": 1, "serving": served} | options)
    write_logs(root, ds_range(START, last))
    rng = np.random.default_rng(7)
    vectors = np.repeat(np.eye(NUM_INTERESTS), 2, axis=1)[np.arange(NUM_PINS) % NUM_INTERESTS]
    vectors = vectors + rng.normal(0, 0.5, (NUM_PINS, FEATURE_DIM))
    (root / "pins").mkdir()
    for day, ds in enumerate(ds_range(START, last)):  # a tenth of the pins come later, one a day
        chosen = list(range(NUM_PINS - 8)) if day == 0 else [NUM_PINS - 9 + day] if day <= 8 else []
        catalogue = {
            "pin": pa.array([f"p{pin}" for pin in chosen], pa.string()),
            "vector": pa.array(vectors[chosen].tolist(), pa.list_(pa.float64())),
        }
        pq.write_table(pa.table(catalogue), root / "pins" / f"{ds}.parquet")
    return site


class DailySites:
    """Copies of the site with a champion: without any day, or after its first days were released."""

    def __init__(self, shared: SharedSites, folder: Path) -> None:
        self._shared, self._folder, self._num_copies = shared, folder, 0

    def new(self) -> Site:
        """Logs of eight days and a champion; nothing is materialized."""
        return self._copy("daily", self._make_new)

    def released(self, last: int) -> Site:
        """The same after one run over the days 0 to `last`."""
        return self._copy(f"daily-{last}", lambda root: self._make_released(root, last))

    def released_twice(self) -> Site:
        """The same after a run over the days 0 to 2, and one of day 3."""
        return self._copy("daily-2-3", self._make_released_twice)

    def other_data(self, site: Site, folder: Path) -> Site:
        """The logs of this site, with the same champion and nothing else in another data directory."""
        other = self._shared.add_mlflow(site.model_copy(update={"data_dir": str(folder)}))
        register_model(other)
        return other

    def _copy(self, name: str, make: Callable[[Path], Site]) -> Site:
        self._num_copies += 1
        return self._shared.copy(name, make, self._folder / f"{name}-copy-{self._num_copies}")

    def _make_new(self, root: Path) -> Site:
        site = self._shared.add_mlflow(make_daily_site(root, last=day(7)))
        register_model(site)
        return site

    def _make_released(self, root: Path, last: int) -> Site:
        site = self._shared.copy("daily", self._make_new, root)
        with dg.DagsterInstance.ephemeral() as instance:
            assert run(site, instance, START, day(last)).success
        return site

    def _make_released_twice(self, root: Path) -> Site:
        site = self._shared.copy("daily-2", lambda root: self._make_released(root, 2), root)
        with dg.DagsterInstance.ephemeral() as instance:
            assert run(site, instance, day(3)).success
        return site


def write_model(site: Site, seed: int = 0) -> Path:
    """Write the tiny model with random weights; return its folder, which is named after the model's version."""
    torch.manual_seed(seed)
    config = tiny()
    model = PinnerFormer(
        config.model,
        feature_dim=FEATURE_DIM,
        num_action_types=3,
        num_surfaces=2,
        time_origin_us=ds_start_us(START),
    )
    description = {
        "action_types": ["click", "closeup", "repin"],
        "surfaces": ["homefeed", "search"],
        "feature_dim": FEATURE_DIM,
        "feature_scale": 1.0,
        "time_origin_us": ds_start_us(START),
        "cut_ds": START,
        "config": config.model_dump(mode="json"),
    }
    run_dir = models_dir(site) / f"model{seed:07d}"
    save_model(run_dir / "model", model, description)
    return run_dir


def register_model(site: Site, seed: int = 0) -> RegisteredModel:
    """The same model as a registry version: candidate, and champion if there is none."""
    run_dir, tracking = write_model(site, seed), Tracking(site)
    run = tracking.start(run_dir, name=run_dir.name, params={}, tags={})
    tracking.keep(run, [run_dir / "model"])
    tracking.register(run, run_dir, model_version=run_dir.name)
    promote_first(tracking)
    candidate = tracking.candidate()
    assert candidate is not None
    return candidate


def run(
    site: Site,
    instance: dg.DagsterInstance,
    first: str,
    last: str | None = None,
    *,
    assets: tuple[str, ...] = DAILY_ASSETS,
    config: dict[str, Any] | None = None,
) -> dg.ExecuteInProcessResult:
    """One Dagster run of the daily assets and their checks: of a day, or of a range."""
    definitions = build_definitions(site)
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last or first}
    return dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.assets(*assets),
        instance=instance,
        tags=tags,
        run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}} | (config or {}),
        raise_on_error=False,
    )


def check_results(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in result.get_asset_check_evaluations()}


def snapshot(site: Site, ds: str) -> dict[Any, tuple[Any, ...]]:
    """User to every other column of the snapshot, the embedding as bytes."""
    state, users = snapshot_state(site), {}
    for bucket in range(state.num_buckets):
        table = state.open_bucket(ds, bucket).to_table()
        vectors = matrix_of(table["embedding"])
        for number, row in enumerate(table.drop_columns(["embedding"]).to_pylist()):
            users[row["user_id"]] = (vectors[number].tobytes(), *list(row.values())[1:])
    return users


def release_content(site: Site) -> tuple[Any, ...]:
    """Every user's vector in the store, and every pin's in the index."""
    release = Serving(site).release()
    users = sorted(snapshot(site, release.manifest["ds"]))
    vectors, found = release.embeddings(users)
    assert found.all()
    assert release.manifest["counts"]["users"] == len(users)
    index = release.index
    assert isinstance(index, PinIndex)
    pins = index.pin_ids.to_pylist()
    return users, vectors.tobytes(), pins, index.vectors(np.arange(len(pins))).tobytes()


def wrong_surface(rows: Rows) -> Rows:
    return rows | {"place": ["find" if place == "home" else "home" for place in rows["place"]]}


def duplicated(rows: Rows) -> Rows:
    """Each event a second time, one second later: not an exact duplicate, which ingestion would drop."""
    doubled = {name: values + values for name, values in rows.items()}
    return doubled | {"time_us": rows["time_us"] + [time + 1_000_000 for time in rows["time_us"]]}


def shifted_clock(rows: Rows) -> Rows:
    """Nine hours slow: many events seem to have happened on the day before."""
    return rows | {"time_us": [time - 9 * 3_600_000_000 for time in rows["time_us"]]}


def day(number: int) -> str:
    """The site's day, counted from 0."""
    return shift_ds(START, number)
