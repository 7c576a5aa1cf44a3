"""A log that is ingested again while timelines are built from it: they say what they are built from, or are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pf_core.days import ds_range, shift_ds
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.logs.partition import raw_digest
from pf_core.timelines import build as timeline_build
from pf_core.timelines.build import build_timelines, timeline_state
from tests.support.sites import START, SmallSite

DAYS = ds_range(START, shift_ds(START, 2))
DAY_S = 86_400
MakeSite = Callable[..., SmallSite]


def log_of(ds: str, pin: str) -> list[Any]:
    day = DAYS.index(ds)
    return [(user, pin, day * DAY_S + float(user), "look") for user in range(1, 20)]


@pytest.fixture(params=["logs/{ds}.parquet", "logs/*.parquet"], ids=["dated", "undated"])
def site(small_site: MakeSite, request: pytest.FixtureRequest) -> SmallSite:
    site = small_site(path=request.param)
    for ds in DAYS:
        (site.root / "logs").mkdir(exist_ok=True)
        site.write_log(ds, log_of(ds, "old")).rename(site.root / "logs" / f"{ds}.parquet")
    site.ingest(DAYS)
    return site


class Meddling(LocalEngine):
    """Calls a function of the test when all buckets are built, and before anything is published."""

    def __init__(self, root: Path, meddle: Callable[[], None]) -> None:
        super().__init__(num_workers=1, memory_mb=64, temp_dir=root / "tmp")
        self._meddle = meddle

    def map_buckets(self, *arguments: Any) -> Iterator[Any]:
        yield from super().map_buckets(*arguments)
        meddle, self._meddle = self._meddle, lambda: None
        meddle()


def ingest_again(site: SmallSite, ds: str) -> None:
    site.write_log(ds, log_of(ds, "new")).rename(site.root / "logs" / f"{ds}.parquet")
    site.ingest([ds])


def build(site: SmallSite, ds: str, meddle: Callable[[], None], *, rebuild: bool = False) -> list[Any]:
    engine = Meddling(site.root, meddle)
    made = build_timelines(
        site.site,
        [ds],
        engine=engine,
        rebuild=rebuild,
        progress=lambda _: None,
    )
    return list(made)


def test_a_day_is_not_ingested_while_timelines_are_built_from_it(site: SmallSite) -> None:
    site.build(DAYS[:1])
    refusals: list[str] = []

    def meddle() -> None:
        with pytest.raises(PipelineError) as refused:
            ingest_again(site, DAYS[1])
        refusals.append(str(refused.value))

    before = raw_digest(site.site, DAYS[1])
    build(site, DAYS[1], meddle)
    assert "or relying on it" in refusals[0]
    assert (
        timeline_state(site.site).require(DAYS[1])["raw_digests"][DAYS[1]] == before == raw_digest(site.site, DAYS[1])
    )
    ingest_again(site, DAYS[1])
    assert raw_digest(site.site, DAYS[1]) != before


def test_timelines_of_an_older_day_that_changed_meanwhile_are_not_published(small_site: MakeSite) -> None:
    site = small_site()
    for ds in DAYS:
        site.write_log(ds, log_of(ds, "old"))
    site.ingest(DAYS)
    site.build(DAYS[:2])
    old = site.timelines(DAYS[1])
    with pytest.raises(
        PipelineError,
        match="raw_actions 2026-01-01 was ingested again while user_timelines 2026-01-03 was made from it; nothing was "
        r"published; run again: .*--partition 2026-01-03 .*rebuild",
    ):
        build(site, DAYS[2], lambda: ingest_again(site, DAYS[0]), rebuild=True)
    assert timeline_state(site.site).days() == DAYS[:2]
    assert site.timelines(DAYS[1]) == old
    build(site, DAYS[2], lambda: None, rebuild=True)
    assert all([pin for _, pin, *_ in rows] == ["new", "old", "old"] for rows in site.timelines(DAYS[2]).values())


def test_a_day_that_became_unusable_meanwhile_is_refused(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the quarantined share is of the files that are read, not of those that were there before."""
    site = small_site()
    site.write_log(DAYS[0], log_of(DAYS[0], "old"))
    site.ingest(DAYS[:1])
    check = timeline_build._refuse_if_quarantined

    def check_and_meddle(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.undo()
        site.write_log(DAYS[0], [*log_of(DAYS[0], "new"), *[(user, "p", 1.0, "dance") for user in range(5)]])
        site.ingest(DAYS[:1])

    monkeypatch.setattr(timeline_build, "_refuse_if_quarantined", check_and_meddle)
    with pytest.raises(PipelineError, match=r"cannot be built from raw_actions 2026-01-01: 20.83% of 24 rows"):
        site.build(DAYS[:1])
    assert timeline_state(site.site).days() == []
