"""The benchmark of one log: every contender answers, all answers are scored once, and one table compares them.

The log is ingested into a data folder of the benchmark's own (`stages.py`). The contenders are our model with the
site's configuration, as served and its vector alone, our model with preset `paper`, the baselines, and the peers, which
tune themselves on a log of training users alone. A contender that fails becomes a row that says why, and the others go
on. The time is bounded: each contender has a budget of its own, and no more than what is left of the whole. Installing
the libraries of the peers is not counted; it happens once.

The test users are looked at once, after the last contender has answered, and the look is recorded (`looks.py`).
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pf_core.benchmark.baselines import BASELINES, mean_of_recent
from pf_core.benchmark.log import BenchmarkLog, RankedLists, tuning_log
from pf_core.benchmark.looks import append_look
from pf_core.benchmark.markdown import to_markdown
from pf_core.benchmark.ours import content_vectors, our_lists
from pf_core.benchmark.peers.environments import cache_folder, ensure_environment, requirements_of
from pf_core.benchmark.peers.run import run_peer
from pf_core.benchmark.peers.tuning import BUDGETS, PEERS, Level, peers_of
from pf_core.benchmark.reading import read_log
from pf_core.benchmark.scoring import score
from pf_core.benchmark.stages import benchmark_site, build_pins, cut_of_log, ingest_log
from pf_core.benchmark.table import Contender, Run, Table, make_table
from pf_core.config.site import Site
from pf_core.config.training_section import Preset
from pf_core.engine.base import Engine
from pf_core.errors import PipelineError
from pf_core.progress import Progress
from pf_core.storage.files import write_json, write_text

TOTAL_S: dict[Level, float] = {"quick": 5 * 60, "default": 20 * 60, "full": 60 * 60}
"""Time of a benchmark on two cores, with reading the log."""

OURS_S: dict[Level, float] = {"quick": 150, "default": 360, "full": 900}
"""Budget of our model with the site's configuration."""

OURS_STEPS: dict[Level, int | None] = {"quick": 300, "default": None, "full": None}
"""Largest number of training steps of towers with the site's configuration; None: its own number. A model of parts
chooses its number of steps itself."""

PAPER_S: dict[Level, float] = {"quick": 0, "default": 150, "full": 480}
"""Budget of our model with preset `paper`: a quick benchmark is too short for a handful of its steps."""

MIN_S = 2.0
"""A contender with less time than this is not started."""

OURS = "PinnerFormer, site's configuration"

VECTOR = "PinnerFormer, vector alone"
"""The same model as OURS, without its memory."""

PAPER = "PinnerFormer, preset paper"

MEANS = {"mean of the newest 20 vectors": 20, "mean of the newest 100 vectors": 100}

SINGLE_VECTOR = (*(peer.label for peer in PEERS.values() if peer.is_single_vector), *MEANS)
"""Contenders whose score is an inner product of a vector of the user and one of the pin."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who makes the table: what the table and the record of looks name."""

    command: str
    date: str
    commit: str
    looks_file: Path
    looks_name: str
    """What the table calls that file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkResult:
    table: Table
    markdown: str
    folder: Path
    """Folder with table.json and table.md."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The lists of a contender, or why there are none, and how they were made."""

    name: str
    lists: RankedLists | None
    failure: str | None = None
    note: str = ""
    seconds: float
    settings: dict[str, Any]
    actions_without_vector: float | None = None
    positives_without_vector: float | None = None
    num_unranked_pins: int | None = None


class Clock:
    """The time of a benchmark; its `progress` adds to each message how much of it is left."""

    def __init__(self, total_s: float, progress: Progress) -> None:
        self.total_s, self._progress, self._started = total_s, progress, time.monotonic()

    @property
    def left_s(self) -> float:
        return self.total_s - (time.monotonic() - self._started)

    def progress(self, message: str) -> None:
        minutes, seconds = divmod(max(0, round(self.left_s)), 60)
        self._progress(f"[at most {minutes}:{seconds:02d} left] {message}")


def run_benchmark(
    site: Site,
    *,
    name: str,
    level: Level,
    seed: int,
    cache: Path,
    folder: Path,
    start_engine: Callable[[Site], Engine],
    origin: Origin,
    progress: Progress,
    only_peers: Sequence[str] = (),
) -> BenchmarkResult:
    """Run all contenders on a site's log; write table.json and table.md to `folder` and return them.

    `cache` takes the ingested log, which a second benchmark of the same log reuses. The site's own data is neither read
    nor written. `only_peers` replaces the peers of the level. A log that cannot be asked about at all (no positives
    after the cut, no test user) is a PipelineError.
    """
    site, peers = benchmark_site(site, cache), peers_of(level, only_peers)
    environments = _environments(peers, progress)
    clock = Clock(TOTAL_S[level], progress)
    with start_engine(site) as engine:
        log, no_vectors = _open_log(site, name, engine, clock)
        baselines = list(_baselines(site, log, no_vectors, clock))
        ours = list(_ours(site, log, no_vectors, level, seed, engine, folder, clock))
    answers = [*ours, *baselines, *_peers(log, peers, environments, level, seed, folder, clock)]
    contenders = [_scored(log, answer) for answer in answers]
    append_look(
        origin.looks_file,
        date=origin.date,
        log=name,
        seed=seed,
        commit=origin.commit,
        contenders=[contender.name for contender in contenders if contender.scores is not None],
        budget=level,
    )
    run = Run(
        command=origin.command,
        date=origin.date,
        seed=seed,
        commit=origin.commit,
        budget=_describe_budget(level),
        looks_file=origin.looks_name,
    )
    table = make_table(log, contenders, run=run, ours=OURS, vector_alone=VECTOR, single_vector=SINGLE_VECTOR)
    result = BenchmarkResult(table=table, markdown=to_markdown(table), folder=folder)
    write_json(folder / "table.json", table)
    write_text(folder / "table.md", result.markdown)
    return result


def _describe_budget(level: Level) -> str:
    return (
        f"{level} (at most {TOTAL_S[level] / 60:.0f} minutes: {OURS_S[level]:.0f} s"
        + " for our configuration"
        + ("" if OURS_STEPS[level] is None else f" (towers: at most {OURS_STEPS[level]} steps)")
        + ", "
        + (f"{PAPER_S[level]:.0f} s for preset paper, " if PAPER_S[level] else "")
        + f"{BUDGETS[level].seconds:.0f} s and {BUDGETS[level].num_settings} settings for each peer)"
    )


def _open_log(site: Site, name: str, engine: Engine, clock: Clock) -> tuple[BenchmarkLog, str | None]:
    """Ingest and read the log; return it, and why there is no pin_features, if there is none."""
    days = ingest_log(site, engine=engine, progress=clock.progress)
    cut_ds, num_days, reason = cut_of_log(site, days)
    notes, no_vectors = [f"{num_days} of {len(days)} days are after the cut ({reason})."], None
    try:
        build_pins(site, cut_ds, engine=engine, progress=clock.progress)
    except PipelineError as error:  # popularity and collaborative filtering need no vectors
        no_vectors = str(error)
    log = read_log(site, name=name, cut_ds=cut_ds, num_days=num_days, progress=clock.progress)
    return replace(log, notes=(*log.notes, *notes)), no_vectors


def _scored(log: BenchmarkLog, answer: Answer) -> Contender:
    return Contender(
        name=answer.name,
        scores=None if answer.lists is None else score(log, answer.lists),
        failure=None if answer.lists is not None else answer.failure or answer.note or "it gave no lists",
        seconds=answer.seconds,
        settings=answer.settings,
        note="" if answer.lists is None else answer.note,
        actions_without_vector=answer.actions_without_vector,
        positives_without_vector=answer.positives_without_vector,
        num_unranked_pins=answer.num_unranked_pins,
    )


# Contenders


def _baselines(site: Site, log: BenchmarkLog, no_vectors: str | None, clock: Clock) -> Iterator[Answer]:
    """Yield the answers of the baselines, which take seconds."""

    @functools.cache
    def vectors() -> np.ndarray:
        _require(no_vectors)
        vector_NF = content_vectors(site, log)
        _require(None if vector_NF.shape[1] else "the site has no content vectors")
        return vector_NF

    def mean(num_actions: int) -> RankedLists:
        return mean_of_recent(log, vectors(), num_actions)

    ranked = {name: functools.partial(rank, log) for name, rank in BASELINES.items()}
    ranked |= {name: functools.partial(mean, num_actions) for name, num_actions in MEANS.items()}
    for name, rank in ranked.items():
        yield _run(name, functools.partial(_timed, name, rank), clock.total_s, clock)


def _timed(name: str, rank: Callable[[], RankedLists], budget_s: float) -> Answer:
    started = time.monotonic()
    return Answer(name=name, lists=rank(), seconds=time.monotonic() - started, settings={})


def _ours(
    site: Site,
    log: BenchmarkLog,
    no_vectors: str | None,
    level: Level,
    seed: int,
    engine: Engine,
    folder: Path,
    clock: Clock,
) -> Iterator[Answer]:
    """Yield the answers of our model with the site's configuration, of its vector alone, and with preset `paper`."""
    alone: list[Answer] = []

    def ours(name: str, preset: Preset | None, budget_s: float) -> Answer:
        _require(no_vectors)
        result = our_lists(
            site,
            log,
            preset=preset,
            seed=seed,
            max_steps=OURS_STEPS[level] if preset is None else None,
            budget_s=budget_s,
            engine=engine,
            folder=folder / "models",
            progress=clock.progress,
        )
        if preset is None:
            note = "the same model without its memory" if result.has_memory else "the model has no memory: as served"
            alone.append(Answer(name=VECTOR, lists=result.vector_lists, note=note, seconds=0.0, settings={}))
        return Answer(
            name=name,
            lists=result.lists,
            note=result.note,
            seconds=result.seconds,
            settings=result.settings,
            num_unranked_pins=result.num_unranked_pins,
            actions_without_vector=result.share_of_actions_without_vector,
            positives_without_vector=result.share_of_positives_without_vector,
        )

    served = _run(OURS, functools.partial(ours, OURS, None), OURS_S[level], clock)
    yield served
    yield alone[0] if alone else replace(served, name=VECTOR)
    if not PAPER_S[level]:
        yield Answer(name=PAPER, lists=None, failure=f"not part of --{level}", seconds=0.0, settings={})
        return
    yield _run(PAPER, functools.partial(ours, PAPER, "paper"), PAPER_S[level], clock)


def _environments(peers: Sequence[str], progress: Progress) -> dict[str, Path | str]:
    """Install the libraries of the peers; return the Python of each family, or why it could not be installed."""
    environments: dict[str, Path | str] = {}
    for family in dict.fromkeys(PEERS[name].family for name in peers):
        try:
            environments[family] = ensure_environment(
                requirements_of(family), name=family, cache=cache_folder(), progress=progress
            )
        except (PipelineError, OSError) as error:
            environments[family] = f"its libraries could not be installed: {error}"
            progress(f"{family}: {environments[family]}")
    return environments


def _peers(
    log: BenchmarkLog,
    names: Sequence[str],
    environments: dict[str, Path | str],
    level: Level,
    seed: int,
    folder: Path,
    clock: Clock,
) -> Iterator[Answer]:
    """Yield the answers of the peers; each has the same budget, or an equal share of what is left."""
    try:
        tuning: BenchmarkLog | None = tuning_log(log, seed=seed)
    except PipelineError as error:  # too few users: each peer takes its first setting, and its note says so
        clock.progress(str(error))
        tuning = None

    def peer(name: str, budget_s: float) -> Answer:
        python = environments[PEERS[name].family]
        if isinstance(python, str):
            raise PipelineError(python)
        result = run_peer(
            name,
            log,
            tuning,
            budget=replace(BUDGETS[level], seconds=budget_s),
            folder=folder / "peers",
            progress=clock.progress,
            python=python,
        )
        settings = {} if result.settings is None else dict(result.settings)
        return Answer(
            name=PEERS[name].label, lists=result.lists, note=result.note, seconds=result.seconds, settings=settings
        )

    for number, name in enumerate(names):
        share_s = clock.left_s / (len(names) - number)
        budget_s = min(BUDGETS[level].seconds, share_s)
        yield _run(PEERS[name].label, functools.partial(peer, name), budget_s, clock)


def _require(missing: str | None) -> None:
    if missing is not None:
        raise PipelineError(missing)


def _run(name: str, answer: Callable[[float], Answer], budget_s: float, clock: Clock) -> Answer:
    """Run a contender with its budget, or what is left; whatever it raises is its answer."""
    started, budget_s = time.monotonic(), min(budget_s, clock.left_s)
    if budget_s < MIN_S:
        return Answer(name=name, lists=None, failure="no time was left for it", seconds=0.0, settings={})
    clock.progress(name)
    try:
        return answer(budget_s)
    except Exception as error:
        what = error.what if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        clock.progress(f"{name}: {what}")
        return Answer(name=name, lists=None, failure=what, seconds=time.monotonic() - started, settings={})
