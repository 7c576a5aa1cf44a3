"""A day's increment on a long history and among many idle users: what a morning costs when only that differs.

An increment is timelines, embeddings of the active users, and their merge into the snapshot, for one day. The same
number of users is active every day, drawn evenly, with four actions each.

- **History.** 1, 30, 90 and 365 days before the day. The days before are built in bulk, and the last of them one by
  one, so that the state is as worn as it would be. A longer history makes longer timelines, of which a day reads and
  writes only the newest segments: it costs more until a user's newest segment and sequence are full, and then no
  more. Two things are shown beside it: the bare reading and writing of the segments that grow, with the same pool;
  and the same history with `max_actions` so low that timelines stop growing within a month, which leaves the cost of
  the days themselves.
- **Idle users.** The same active users among 1, 4 and 16 times as many idle ones, who were there once.

Three days in a row are measured, and the median counts: embeddings of a day that is run again would be taken over. The
pool is warm. Ratios are given by the clock and in processor time. The bar is ours: less than 2 x the processor time
that it has after 30 days (on the second day nine in ten users are new), and among as many idle users as active ones.
"""

import argparse
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_increment import time_baseline
from measuring import MEMORY_MB, NUM_WORKERS, cpu_so_far_s, num_buckets_for, report, say, working_directory
from scale_site import (
    ACTIONS_PER_SESSION,
    START_DS,
    Run,
    Size,
    make_site,
    pin_ids,
    run_stage,
    user_ids,
    wake_pool,
    write_catalogue,
    write_day,
    write_model,
)

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.engine.local import LocalEngine

HISTORIES = (1, 30, 90, 365)
IDLE_TIMES = (1, 4, 16)
NUM_MEASURED = 3
NUM_WORN = 25
"""Days that are built one by one before the measured ones: from 24 fragments on, a bucket is rewritten."""
CAPPED_ACTIONS = 8
NUM_PINS = 10_000
INCREMENT = ("user_timelines", "user_embeddings", "user_embedding_snapshot")
MAX_GROWTH = 2


@dataclass(frozen=True, kw_only=True)
class Increment:
    """Median seconds of a measured day."""

    timelines_s: float
    embeddings_s: float
    snapshot_s: float
    bare_s: float
    """Seconds for merely reading and writing the rows of the active users."""
    cpu_s: float
    """Processor time of all three, which other work on the machine does not change."""
    bare_cpu_s: float

    @property
    def total_s(self) -> float:
        return self.timelines_s + self.embeddings_s + self.snapshot_s


class Logs:
    """Days on which some users are active; on the first one, everybody who is ever to be known may come."""

    def __init__(self, folder: Path, num_days: int) -> None:
        self.folder, self.days = folder, ds_range(START_DS, shift_ds(START_DS, num_days - 1))
        self.active: dict[str, np.ndarray] = {}
        self._pins = pin_ids(NUM_PINS)

    def write(self, pool: np.ndarray, num_active: int, *, first_day: np.ndarray | None = None) -> None:
        write_catalogue(self.folder, self.days, self._pins)
        for number, ds in enumerate(self.days):
            rng = np.random.default_rng(number)
            users = rng.choice(pool, num_active, replace=False)
            self.active[ds] = users = first_day if first_day is not None and number == 0 else users
            write_day(self.folder, ds, np.repeat(users, ACTIONS_PER_SESSION), self._pins, rng)


def time_increments(site: Site, served: ServedModel, logs: Logs, engine: LocalEngine) -> Increment:
    """Build the state up to the measured days, then these; raw_actions and pin_features are there."""
    before, measured = logs.days[:-NUM_MEASURED], logs.days[-NUM_MEASURED:]
    first_worn = max(0, len(before) - NUM_WORN)
    if first_worn > 0:
        run_stage("rebuilt_timelines", Run(site=site, days=[before[first_worn - 1]], served=served), engine)
    for name, days in zip(INCREMENT, (before[first_worn:], before[-1:], before[-1:]), strict=True):
        run_stage(name, Run(site=site, days=days, served=served), engine)
    seconds: dict[str, list[float]] = {name: [] for name in (*INCREMENT, "bare", "cpu", "bare_cpu")}
    for ds in measured:
        cpu_before = cpu_so_far_s()
        seconds["bare"].append(time_baseline(site, shift_ds(ds, -1), logs.active[ds], engine))
        cpu_between = cpu_so_far_s()
        for name in INCREMENT:
            seconds[name].append(run_stage(name, Run(site=site, days=[ds], served=served), engine)[0])
        seconds["bare_cpu"].append(cpu_between - cpu_before)
        seconds["cpu"].append(cpu_so_far_s() - cpu_between)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return Increment(
        timelines_s=median["user_timelines"],
        embeddings_s=median["user_embeddings"],
        snapshot_s=median["user_embedding_snapshot"],
        bare_s=median["bare"],
        cpu_s=median["cpu"],
        bare_cpu_s=median["bare_cpu"],
    )


def prepare(folder: Path, logs: Logs, num_users: int, num_buckets: int, engine: LocalEngine) -> Site:
    size = Size(num_users=num_users, num_actions=0, num_pins=NUM_PINS, num_days=len(logs.days) - 1)
    site = make_site(folder, size, num_buckets=num_buckets)
    for name in ("raw_actions", "pin_features"):
        run_stage(name, Run(site=site, days=logs.days, served=write_model(folder)), engine)
    return site


def tell(what: str, one: Increment) -> None:
    say(
        f"{what}: {one.total_s:.2f} s (timelines {one.timelines_s:.2f}, embeddings {one.embeddings_s:.2f}, "
        f"snapshot {one.snapshot_s:.2f}), {one.cpu_s:.2f} core-s; rows read and written alone {one.bare_s:.2f} s, "
        f"{one.bare_cpu_s:.2f} core-s"
    )


def run_history(folder: Path, num_days: int, num_users: int, num_active: int, engine: LocalEngine) -> list[Increment]:
    """With the year kept, and with the newest few actions of a user."""
    logs = Logs(folder / "logs", num_days + NUM_MEASURED)
    logs.write(user_ids(num_users), num_active)
    site = prepare(folder, logs, num_users, num_buckets_for(num_users), engine)
    results = []
    for max_actions in (site.timelines.max_actions, CAPPED_ACTIONS):
        timelines = site.timelines.model_copy(update={"max_actions": max_actions})
        capped = site.model_copy(update={"timelines": timelines})
        results.append(time_increments(capped, write_model(folder), logs, engine))
        tell(f"{num_days} days of history, {num_active:,} active of {num_users:,}, {max_actions:,} kept", results[-1])
        for name in INCREMENT:
            shutil.rmtree(site.directory / name)
    return results


def run_idle(folder: Path, num_users: int, num_idle: int, num_active: int, engine: LocalEngine) -> Increment:
    """The first users are those of whom some are active; the others came on the first day alone."""
    everybody = user_ids(num_users + num_idle)
    logs = Logs(folder / "logs", 1 + NUM_MEASURED)
    logs.write(everybody[:num_users], num_active, first_day=everybody)
    num_buckets = num_buckets_for(num_users * IDLE_TIMES[1])
    site = prepare(folder, logs, len(everybody), num_buckets, engine)
    result = time_increments(site, write_model(folder), logs, engine)
    tell(f"{num_active:,} active of {num_users:,}, {num_idle:,} idle", result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few users, short histories")
    quick = parser.parse_args().quick
    num_users, num_active, histories = (500, 50, (1, 4)) if quick else (100_000, 10_000, HISTORIES)
    history: dict[int, list[Increment]] = {}
    idle: dict[int, Increment] = {}
    with working_directory(None) as root:
        with LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=root / "spill") as engine:
            wake_pool(engine)
            for num_days in histories:
                folder = root / f"history-{num_days}"
                history[num_days] = run_history(folder, num_days, num_users, num_active, engine)
                shutil.rmtree(folder)
            for times in IDLE_TIMES[:2] if quick else IDLE_TIMES:
                folder = root / f"idle-{times}"
                idle[times] = run_idle(folder, num_users // 2, times * num_users // 2, num_active, engine)
                shutil.rmtree(folder)
    whole, capped = ({days: pair[number] for days, pair in history.items()} for number in (0, 1))
    reference = histories[1]
    for days, one in whole.items():
        report(f"increment_after_{days}_days", one.total_s, "s")
        report(f"increment_after_{days}_days_over_{reference}", one.total_s / whole[reference].total_s, "x")
        growth = one.cpu_s / whole[reference].cpu_s
        report(f"increment_after_{days}_days_over_{reference}_cpu", growth, "x", bar=f"< {MAX_GROWTH}")
        report(f"increment_after_{days}_days_timelines_over_read_write", one.timelines_s / one.bare_s, "x")
    for days, one in capped.items():
        growth = one.cpu_s / capped[reference].cpu_s
        report(f"increment_after_{days}_days_of_short_rows_over_{reference}_cpu", growth, "x", bar=f"< {MAX_GROWTH}")
    for times, one in idle.items():
        report(f"increment_at_{times}x_idle_users", one.total_s / idle[1].total_s, "x")
        growth = one.cpu_s / idle[1].cpu_s
        report(f"increment_at_{times}x_idle_users_cpu", growth, "x", bar=f"< {MAX_GROWTH}")
        report(f"increment_at_{times}x_idle_users_bare_cpu", one.bare_cpu_s / idle[1].bare_cpu_s, "x")


if __name__ == "__main__":
    main()
