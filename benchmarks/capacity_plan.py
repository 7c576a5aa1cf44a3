"""The tables of docs/scale.md, from the figures that `bench_scale.py --json` wrote: measured, fitted, extrapolated.

    python benchmarks/capacity_plan.py docs/scale.json

A stage is fitted by fixed seconds + seconds a unit, over all sizes, so that the relative errors are least. What is
extrapolated is processor time, of all processes: on more cores it is shared out, as far as a stage can be.
`Assumptions` are what no benchmark of ours can know.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_inference import FEATURE_DIM
from bench_scale import LOGS_TO_STORE
from bench_training import model_flops

from pf_core.config.training import paper
from pf_core.model.flops import flops_per_user

HOUR_S = 3600
ROUNDED_UP = 0.9995
"""From here on, three digits show the next power."""
POSITIVES_PER_SEQUENCE = 32
Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The paper's site, as far as the paper says (over 500M users, billions of pins); the rest is assumed."""

    num_users: int = 500_000_000
    num_pins: int = 1_000_000_000
    active_share: float = 0.3
    """Share of the users who are active on a day."""
    actions_per_active_user: int = 30
    row_actions: int = 6_000
    """Actions in the timeline of an active user: 30 on more than half of the days of a year."""
    short_row_actions: int = 1_000
    """Actions in a timeline with `max_actions: 1000`."""
    segment_actions: int = 64
    """Actions in a full segment of a timeline; the newest segment, which a day rewrites, is half full on average."""
    num_buckets: int = 16_384
    """Buckets of 30,000 users."""
    gpu_flops_per_s: float = 125e12
    """40 % of the 312 TFLOP/s (bfloat16) that an A100 is sold with."""
    num_shards: int = 128
    """Shards of the index."""
    num_cores: int = 1024
    """Cores of the cluster."""
    cores_of_a_machine: int = 64

    @property
    def num_active(self) -> float:
        return self.num_users * self.active_share

    @property
    def num_actions(self) -> float:
        return self.num_active * self.actions_per_active_user


@dataclass(frozen=True, kw_only=True)
class Fit:
    fixed: float
    per_unit: float

    def at(self, num_units: float) -> float:
        return self.fixed + self.per_unit * num_units


class Figures:
    """What was measured, by phase and stage, the sizes in ascending order."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.sizes: list[dict[str, Any]] = sorted(content["sizes"], key=lambda one: int(one["size"]["num_actions"]))
        self.pin_lookups: list[dict[str, Any]] = content["pin_lookups"]
        self.keys: list[Key] = [(stage["phase"], stage["name"]) for stage in self.sizes[-1]["stages"]]

    def stages(self, key: Key) -> list[dict[str, Any]]:
        found = [stage for size in self.sizes for stage in size["stages"] if (stage["phase"], stage["name"]) == key]
        assert len(found) == len(self.sizes)
        return found

    def fit(self, key: Key, column: str, unit: Callable[[dict[str, Any]], float] | None = None) -> Fit:
        """Least squares of the relative errors; neither part is negative."""
        stages = self.stages(key)
        units = np.array([stage["num_units"] if unit is None else unit(stage) for stage in stages], float)
        values = np.array([stage[column] for stage in stages], float)
        if len(stages) > 1:
            weighted = np.stack([np.ones(len(units)), units], axis=1) / values[:, None]
            fixed, per_unit = np.linalg.lstsq(weighted, np.ones(len(units)), rcond=None)[0]
            if fixed >= 0 and per_unit >= 0:
                return Fit(fixed=float(fixed), per_unit=float(per_unit))
        return Fit(fixed=0.0, per_unit=float(values[-1] / units[-1]))

    def lookup_s(self, num_pins: float) -> float:
        """Processor time of an action's pin, looked up among `num_pins` pins: a line in the logarithm of the pins."""
        doublings = [np.log2(lookup["num_pins"]) for lookup in self.pin_lookups]
        costs = [lookup["cpu_s"] / lookup["num_actions"] for lookup in self.pin_lookups]
        return float(np.polyval(np.polyfit(doublings, costs, 1), np.log2(num_pins)))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def short(number: float) -> str:
    """1.2k, 34M: three digits."""
    for power, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power * ROUNDED_UP:
            return f"{number / power:.3g}{letter}"
    return f"{number:.3g}"


def hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.0f}" if seconds >= 10 * HOUR_S else f"{seconds / HOUR_S:.2g}"


def print_measured(figures: Figures) -> None:
    """Microseconds of wall clock for a unit at every size, and what the largest took."""
    names = [f"{short(size['size']['num_actions'])} actions" for size in figures.sizes]
    rows = []
    for key in figures.keys:
        stages = figures.stages(key)
        costs = [f"{1e6 * stage['seconds'] / stage['num_units']:.3g}" for stage in stages]
        last = stages[-1]
        size = f"{last['num_bytes'] / last['num_units']:.3g}" if last["num_bytes"] > 0 else ""
        rows.append(
            [*key, f"µs a {last['unit']}", *costs, f"{last['seconds']:.1f}", size, f"{last['peak_gb']:.2f}"],
        )
    print_table(["phase", "stage", "", *names, "s at the largest", "bytes a unit", "peak GB"], rows)


def print_end_to_end(figures: Figures) -> None:
    """The backfill without the pins, for an action: by the clock and in processor time."""
    rows = []
    for size in figures.sizes:
        stages = [one for one in size["stages"] if one["phase"] == "backfill" and one["name"] in LOGS_TO_STORE]
        seconds, cpu_s = (sum(stage[column] for stage in stages) for column in ("seconds", "cpu_s"))
        num_actions, num_users = stages[0]["num_units"], size["size"]["num_users"]
        costs = [f"{1e6 * used / num_actions:.1f}" for used in (seconds, cpu_s)]
        peak = max(stage["peak_gb"] for stage in size["stages"])
        rows.append([short(num_actions), short(num_users), f"{seconds:,.0f}", *costs, f"{peak:.2f}"])
    print_table(["actions", "users", "s, raw logs to store", "µs an action", "core-µs an action", "peak GB"], rows)


def print_fits(figures: Figures) -> None:
    rows = []
    for key in figures.keys:
        wall, cpu, last = figures.fit(key, "seconds"), figures.fit(key, "cpu_s"), figures.stages(key)[-1]
        off = [stage["seconds"] / wall.at(stage["num_units"]) for stage in figures.stages(key)]
        slopes = [f"{1e6 * fit.per_unit:.3g}" for fit in (wall, cpu)]
        rows.append([*key, last["unit"], f"{wall.fixed:.2g}", *slopes, f"{min(off):.2f} to {max(off):.2f}"])
    head = ["phase", "stage", "unit", "fixed s", "µs a unit", "core-µs a unit", "measured over fitted"]
    print_table(head, rows)


class Plan:
    """The assumed site, by the measured costs."""

    def __init__(self, figures: Figures, site: Assumptions) -> None:
        self.figures, self.site = figures, site

    def core_s(self, phase: str, name: str, num_units: float) -> float:
        return self.figures.fit((phase, name), "cpu_s").at(num_units)

    def bytes_of(self, phase: str, name: str, num_units: float) -> float:
        return self.figures.fit((phase, name), "num_bytes").per_unit * num_units

    def timelines(self, num_rewritten: float) -> "Line":
        """A morning's, by the actions that are written: the day's own, and those of the segments that grow."""

        def rewritten(stage: dict[str, Any]) -> float:
            return float(stage["counts"]["rewritten_actions"])

        key = ("morning", "user_timelines")
        core_s = self.figures.fit(key, "cpu_s", rewritten).at(num_rewritten)
        num_bytes = self.figures.fit(key, "written_bytes", rewritten).per_unit * num_rewritten
        name, of = "user_timelines", f"{short(self.site.num_active)} segments, {short(num_rewritten)} actions"
        return Line(name, of, core_s, num_bytes, self.site.num_cores)

    def timelines_bytes(self, num_actions: float) -> float:
        return self.figures.fit(("rebuild", "rebuilt_timelines"), "written_bytes").per_unit * num_actions

    def morning(self) -> list["Line"]:
        site = self.site
        actions, active, users, pins = site.num_actions, site.num_active, site.num_users, site.num_pins
        wide, rewritten = site.num_cores, active * (site.segment_actions / 2 + site.actions_per_active_user)
        read = active * paper().model.sequence_length

        def line(name: str, of: str, num: float, width: int, phase: str = "morning") -> Line:
            asset = name.split(",")[0]
            core_s, written = self.core_s(phase, asset, num), self.bytes_of(phase, asset, num)
            return Line(name, f"{short(num)} {of}", core_s, written, width)

        return [
            line("raw_actions", "actions", actions, wide),
            self.timelines(rewritten),
            line("user_embeddings, without the paper's model", "users", active, wide),
            Line("on top: its pins looked up", f"{short(read)} actions", read * self.figures.lookup_s(pins), 0, wide),
            line("user_embedding_snapshot", "users", active, wide),
            line("release, everybody anew", "users", users, 1, "backfill"),
            line("pin_embeddings", "pins", pins, site.cores_of_a_machine, "backfill"),
            line("pin_index", "pins", pins, wide, "backfill"),
        ]

    def kept(self) -> list[tuple[str, float]]:
        site = self.site
        return [
            ("raw_actions, a day", self.bytes_of("backfill", "raw_actions", site.num_actions)),
            ("user_timelines, one day's state", self.timelines_bytes(site.num_users * site.row_actions)),
            (
                f"the same, max_actions {site.short_row_actions:,}",
                self.timelines_bytes(site.num_users * site.short_row_actions),
            ),
            (
                "user_embedding_snapshot, one day's state",
                self.bytes_of("backfill", "user_embedding_snapshot", site.num_users),
            ),
            ("a release's store", self.bytes_of("backfill", "release", site.num_users)),
            ("pin_features", self.bytes_of("backfill", "pin_features", site.num_pins)),
            ("pin_embeddings", self.bytes_of("backfill", "pin_embeddings", site.num_pins)),
            ("pin_index, which is in memory too", self.bytes_of("backfill", "pin_index", site.num_pins)),
        ]

    def on_gpus(self) -> list[list[str]]:
        site, num_steps, per_step = self.site, paper().optimizer.num_steps, flops_per_step()
        per_user = flops_per_user(paper().model, feature_dim=FEATURE_DIM)
        work = [
            ("the active users", f"{short(site.num_active)} users", site.num_active * per_user),
            ("everybody, after a promotion", f"{short(site.num_users)} users", site.num_users * per_user),
            ("a training", f"{num_steps:,} steps", num_steps * per_step),
        ]
        return [[name, of, short(flops), hours(flops / site.gpu_flops_per_s)] for name, of, flops in work]


@dataclass(frozen=True)
class Line:
    """One stage of a morning."""

    name: str
    of: str
    core_s: float
    num_bytes: float
    width: int
    """Cores that can work on it at a time."""

    def cells(self) -> list[str]:
        size = f"{short(self.num_bytes)}B" if self.num_bytes else ""
        return [self.name, self.of, size, hours(self.core_s), f"{self.width:,}", hours(self.core_s / self.width)]


def print_plan(plan: Plan) -> None:
    lines = plan.morning()
    head = ["stage, a morning", "of", "written", "core-hours", "cores that can share it", "hours"]
    print_table(head, [line.cells() for line in lines])
    print_table(["the paper's model", "of", "FLOP", "GPU-hours"], plan.on_gpus())
    kept = plan.kept()
    print_table(["on disk", "bytes"], [[name, f"{short(size)}B"] for name, size in kept])
    site, index_bytes = plan.site, kept[-1][1]
    long, brief = (f"{short(kept[number][1] / site.num_buckets)}B" for number in (1, 2))
    print(
        f"A bucket of {site.num_buckets:,} has {site.num_users / site.num_buckets:,.0f} users and {long} of timelines "
        f"({brief} with {site.short_row_actions:,} actions a user); one of {site.num_shards} shards of the index, "
        f"{short(index_bytes / site.num_shards)}B."
    )
    lookups = plan.figures.pin_lookups
    found = ", ".join(f"among {short(one['num_pins'])} pins in {one['cpu_s']:.2f} core-s" for one in lookups)
    print(f"The pins of {lookups[0]['num_actions']:,} actions are found {found}.")


def flops_per_step() -> float:
    config = paper()
    pairs = config.batch_users * POSITIVES_PER_SEQUENCE
    return model_flops(config, feature_dim=FEATURE_DIM, sequences=config.batch_users, pairs=pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    figures = Figures(parser.parse_args().figures)
    print_end_to_end(figures)
    print_measured(figures)
    print_fits(figures)
    print_plan(Plan(figures, Assumptions()))


if __name__ == "__main__":
    main()
