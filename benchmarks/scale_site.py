"""What the benchmarks of scale run on: a site of any size, and the daily assets' own functions as stages.

Logs are drawn with numpy and written day by day, so that making them takes the memory of one day. Users are unequal:
how often one comes is lognormal, so that the median user of a month is idle on four days in five, while a few are there
every day; who comes brings a session of four actions on average. Everybody comes at least once in the days of the site.
Popular pins get most of the actions.

The model has random weights and reads 32 actions in 2 layers of 32, but takes in content vectors of 256 numbers and
gives embeddings of 256, as the paper's: what is stored and moved has the real size, what is computed has not.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_inference import EVENTS, FEATURE_DIM, SURFACES, make_model
from measuring import num_buckets_for, world_site

from pf_core.config.site import Site
from pf_core.config.training import ModelConfig, choose
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.users import embed_days
from pf_core.engine.base import Engine
from pf_core.logs.ingest import ingest_days
from pf_core.pins.features import build_pin_features
from pf_core.serving.build_index import build_index_days
from pf_core.serving.publish import publish_release
from pf_core.timelines.build import build_timelines

START_DS = "2026-01-01"
ACTIVITY_SIGMA = 1.5
"""Standard deviation of the logarithm of a user's number of visits."""
ACTIONS_PER_SESSION = 4
PIN_SKEW = 3
"""Pins are drawn as the power of a uniform number: the first eighth of them gets half of the actions."""
ROWS_PER_FILE = 1 << 20
WAKE_S = 0.1
NOBODY = pa.array([], pa.int64())


@dataclass(frozen=True, kw_only=True)
class Size:
    num_users: int
    num_actions: int
    num_pins: int
    num_days: int

    @property
    def days(self) -> list[str]:
        return ds_range(START_DS, shift_ds(START_DS, self.num_days - 1))

    @property
    def morning(self) -> str:
        """The day after, which is added to them."""
        return shift_ds(START_DS, self.num_days)

    def divided(self, divisor: int) -> "Size":
        """The same days and actions per user, with fewer users."""
        return Size(
            num_users=self.num_users // divisor,
            num_actions=self.num_actions // divisor,
            num_pins=max(self.num_pins // divisor, 1000),
            num_days=self.num_days,
        )


# Logs


def user_ids(num_users: int) -> np.ndarray:
    """Distinct, neither dense nor in order."""
    return np.arange(num_users, dtype=np.int64) * 2_654_435_761 % (1 << 52)


def write_logs(folder: Path, size: Size) -> None:
    """The site's days, the morning after them, and the catalogue, which is complete from the first day on."""
    ids = user_ids(size.num_users)
    visits = np.random.default_rng(0).lognormal(0, ACTIVITY_SIGMA, size.num_users)
    share = np.cumsum(visits) / visits.sum()
    pins = pin_ids(size.num_pins)
    num_rows = size.num_actions // size.num_days
    write_catalogue(folder, [*size.days, size.morning], pins)
    for number, ds in enumerate([*size.days, size.morning]):
        rng = np.random.default_rng([size.num_users, number])
        newcomers = ids[number :: size.num_days] if ds != size.morning else ids[:0]
        num_sessions = int(1.1 * num_rows / ACTIONS_PER_SESSION) + 100  # more than enough; the rest is cut
        visitors = ids[np.searchsorted(share, rng.random(num_sessions))]
        users = np.repeat(visitors, rng.geometric(1 / ACTIONS_PER_SESSION, num_sessions))
        write_day(folder, ds, np.concatenate([newcomers, users])[:num_rows], pins, rng)


def pin_ids(num_pins: int) -> pa.Array:
    return pa.array([f"pin{number:07d}" for number in range(num_pins)])


def write_day(folder: Path, ds: str, users: np.ndarray, pins: pa.Array, rng: np.random.Generator) -> None:
    """One action for each entry of `users`, at random times of the day, in the order of time."""
    path = folder / "actions" / ds
    path.mkdir(parents=True)
    users = rng.permutation(users)
    times = ds_start_us(ds) // 1000 + np.sort(rng.integers(0, 86_400_000, len(users)))
    for part, first in enumerate(range(0, len(users), ROWS_PER_FILE)):
        rows = slice(first, first + ROWS_PER_FILE)
        num = len(users[rows])
        table = pa.table(
            {
                "event_time_ms": times[rows],
                "user": users[rows],
                "pin": pins.take(pa.array((rng.random(num) ** PIN_SKEW * len(pins)).astype(np.int64))),
                "event": pa.array(list(EVENTS)).take(pa.array(rng.integers(0, len(EVENTS), num))),
                "surface": pa.array(list(SURFACES)).take(pa.array(rng.integers(0, len(SURFACES), num))),
                "dwell_ms": rng.integers(0, 60_000, num),
            }
        )
        pq.write_table(table, path / f"part-{part:03d}.parquet")


def write_catalogue(folder: Path, days: Sequence[str], pins: pa.Array) -> None:
    """All pins on the first day, none on the days after it."""
    (folder / "pins").mkdir(parents=True)
    rng = np.random.default_rng(1)
    vectors = pa.array(rng.standard_normal(len(pins) * FEATURE_DIM, np.float32))
    table = pa.table({"pin": pins, "vector": pa.FixedSizeListArray.from_arrays(vectors, FEATURE_DIM)})
    for ds in days:
        pq.write_table(table if ds == days[0] else table.slice(0, 0), folder / "pins" / f"{ds}.parquet")


def make_site(folder: Path, size: Size, *, num_buckets: int | None = None) -> Site:
    return world_site(
        logs=folder / "logs",
        data_dir=folder / "data",
        start_ds=START_DS,
        end_ds=size.morning,
        num_buckets=num_buckets or num_buckets_for(size.num_users),
    )


def small_model() -> ModelConfig:
    shape = {"sequence_length": 32, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "embedding_dim": 256}
    return choose("tiny", {"model": shape}).model


def write_model(folder: Path) -> ServedModel:
    return make_model(folder / "model", small_model())


# Stages: what the assets call


@dataclass(frozen=True, kw_only=True)
class Run:
    """Days of a site that a stage is run for, as one Dagster run does."""

    site: Site
    days: list[str]
    served: ServedModel


Counts = dict[str, int]


def _quiet(_: str) -> None:
    pass


def _last(manifests: Iterable[dict[str, Any]]) -> Counts:
    *_, newest = (dict(manifest["counts"]) for manifest in manifests)
    return newest


def _raw_actions(run: Run, engine: Engine) -> Counts:
    made = ingest_days(run.site, run.days, engine=engine, forgotten=NOBODY, progress=_quiet)
    return {"actions": sum(manifest["counts"]["kept"] for manifest in made)}


def _pin_features(run: Run, engine: Engine) -> Counts:
    return _last(build_pin_features(run.site, run.days, engine=engine, progress=_quiet))


def _user_timelines(run: Run, engine: Engine) -> Counts:
    made = build_timelines(run.site, run.days, engine=engine, forgotten=NOBODY, rebuild=False, progress=_quiet)
    return _last(made)


def _rebuilt_timelines(run: Run, engine: Engine) -> Counts:
    last = run.days[-1:]
    return _last(build_timelines(run.site, last, engine=engine, forgotten=NOBODY, rebuild=True, progress=_quiet))


def _user_embeddings(run: Run, engine: Engine) -> Counts:
    made = embed_days(
        run.site,
        run.days[-1:],
        model_for=lambda ds: run.served,
        everyone=False,  # on the first day it is everyone anyway
        engine=engine,
        forgotten=NOBODY,
        progress=_quiet,
    )
    return _last(made)


def _user_embedding_snapshot(run: Run, engine: Engine) -> Counts:
    return _last(merge_days(run.site, run.days[-1:], engine=engine, forgotten=NOBODY, progress=_quiet))


def _pin_embeddings(run: Run, engine: Engine) -> Counts:
    made = embed_pin_days(run.site, run.days[-1:], model_for=lambda ds: run.served, engine=engine, progress=_quiet)
    return _last(made)


def _pin_index(run: Run, engine: Engine) -> Counts:
    return _last(build_index_days(run.site, run.days[-1:], engine=engine, progress=_quiet))


def _release(run: Run, engine: Engine) -> Counts:
    return dict(publish_release(run.site, run.days[-1], engine=engine, progress=_quiet)["counts"])


STAGES: dict[str, Callable[[Run, Engine], Counts]] = {
    "raw_actions": _raw_actions,
    "pin_features": _pin_features,
    "user_timelines": _user_timelines,
    "rebuilt_timelines": _rebuilt_timelines,
    "user_embeddings": _user_embeddings,
    "user_embedding_snapshot": _user_embedding_snapshot,
    "pin_embeddings": _pin_embeddings,
    "pin_index": _pin_index,
    "release": _release,
}
"""By asset; `rebuilt_timelines` is user_timelines of the last day, from the logs of all days at once."""


def wake(_: int) -> None:
    """Make a worker import everything; slow enough that every worker gets one such task."""
    time.sleep(WAKE_S)


def do_nothing(_: int) -> None:
    """The smallest task, to see what an engine itself costs."""


def wake_pool(engine: Engine) -> None:
    list(engine.map_buckets(wake, range(4 * engine.num_workers)))


def run_stage(name: str, run: Run, engine: Engine) -> tuple[float, Counts]:
    """Seconds of a stage, and what it counted."""
    started = time.perf_counter()
    counts = STAGES[name](run, engine)
    return time.perf_counter() - started, counts


def bytes_in(folder: Path) -> int:
    """What a folder takes on disk; a file that several names share counts once."""
    found: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            status = (Path(place) / name).stat()
            found[status.st_ino] = status.st_size
    return sum(found.values())
