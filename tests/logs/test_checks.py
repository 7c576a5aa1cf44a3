"""Data checks of raw_actions: each passes on a good manifest and fails on a doctored one."""

from pathlib import Path
from typing import Any

import pytest

from pf_core.config.site import QualityConfig, Site
from pf_core.days import shift_ds
from pf_core.logs.checks import judge_quarantine, judge_volume, trailing_manifests
from pf_core.logs.partition import partition_dir
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import write_json

DS = "2026-01-20"
QUALITY = QualityConfig(
    max_quarantined_share=0.02, trailing_days=14, min_trailing_days=3, min_volume_ratio=0.5, max_volume_ratio=2.0
)


def manifest(ds: str = DS, *, read: int = 1000, kept: int = 1000, quarantined: dict[str, int] | None = None) -> Any:
    rejects = quarantined or {}
    counts = {"read": read, "kept": kept, "quarantined": sum(rejects.values())}
    return {"ds": ds, "counts": counts, "quarantined_by_reason": rejects}


def days_before(*kept: int) -> list[Any]:
    return [manifest(shift_ds(DS, -offset), kept=number) for offset, number in enumerate(kept, 1)]


# Quarantine


def test_a_clean_day_passes() -> None:
    verdict = judge_quarantine(manifest(), QUALITY)
    assert verdict.passed
    assert verdict.ds == DS
    assert verdict.reason == "0.00% of 1,000 rows quarantined, at most 2.00% allowed"


@pytest.mark.parametrize(("num_bad", "passed"), [(19, True), (20, True), (21, False), (1000, False)])
def test_the_quarantined_share_may_reach_its_bound(num_bad: int, passed: bool) -> None:
    """2% of 1,000 rows are 20."""
    verdict = judge_quarantine(manifest(read=1000, quarantined={"ts: missing (column t)": num_bad}), QUALITY)
    assert verdict.passed is passed


def test_the_verdict_names_the_most_frequent_reason() -> None:
    doctored = manifest(read=4000, quarantined={"a: rare": 40, "b: frequent": 200, "c: rare": 60})
    verdict = judge_quarantine(doctored, QUALITY)
    assert not verdict.passed
    share = (40 + 200 + 60) / 4000
    assert verdict.reason == f"{share:.2%} of 4,000 rows quarantined, at most 2.00% allowed; most often: b: frequent"


def test_a_day_without_rows_has_no_quarantine() -> None:
    assert judge_quarantine(manifest(read=0, kept=0), QUALITY).passed


def test_the_allowed_share_may_be_nothing_or_everything() -> None:
    doctored = manifest(read=1000, quarantined={"a": 1})
    assert not judge_quarantine(doctored, QualityConfig(max_quarantined_share=0)).passed
    assert judge_quarantine(manifest(), QualityConfig(max_quarantined_share=0)).passed
    everything = manifest(read=10, kept=0, quarantined={"a": 10})
    assert judge_quarantine(everything, QualityConfig(max_quarantined_share=1)).passed


# Volume


def test_a_normal_day_passes() -> None:
    verdict = judge_volume(manifest(kept=900), days_before(1000, 1200, 800), QUALITY)
    assert verdict.passed
    assert verdict.ds == DS
    assert verdict.reason == "900 actions, 0.90 times the median of the 3 days before; normal is 0.5 to 2"


@pytest.mark.parametrize(
    ("kept", "passed"), [(499, False), (500, True), (1000, True), (2000, True), (2001, False), (100_000, False)]
)
def test_the_volume_stays_between_half_and_twice_the_median(kept: int, passed: bool) -> None:
    trailing = days_before(100, 1000, 1000, 9000)  # two odd days do not move the median
    assert judge_volume(manifest(kept=kept), trailing, QUALITY).passed is passed


def test_the_median_of_an_even_number_of_days_lies_between_them() -> None:
    trailing = days_before(100, 200, 400, 10_000)
    median = (200 + 400) / 2
    assert judge_volume(manifest(kept=int(median / 2)), trailing, QUALITY).passed
    assert not judge_volume(manifest(kept=int(median / 2) - 1), trailing, QUALITY).passed
    assert judge_volume(manifest(kept=int(median * 2)), trailing, QUALITY).passed
    assert not judge_volume(manifest(kept=int(median * 2) + 1), trailing, QUALITY).passed


def test_an_empty_day_fails_whatever_came_before() -> None:
    for trailing in ([], days_before(1000, 1000, 1000), days_before(0, 0, 0)):
        verdict = judge_volume(manifest(read=0, kept=0), trailing, QUALITY)
        assert not verdict.passed
        assert verdict.reason == "no actions at all; if the site was silent, min_volume_ratio: 0 lets the day pass"


def test_the_first_days_have_nothing_to_compare_with() -> None:
    verdict = judge_volume(manifest(kept=5), days_before(1000, 1000), QUALITY)
    assert verdict.passed
    assert verdict.reason == "5 actions; only 2 earlier days to compare with"
    assert not judge_volume(manifest(kept=5), days_before(1000, 1000, 1000), QUALITY).passed


def test_actions_after_an_outage_are_abnormal() -> None:
    assert not judge_volume(manifest(kept=5), days_before(0, 0, 0), QUALITY).passed


# Which days are compared


def site_in(root: Path) -> Site:
    ids = {"column": "id"}
    actions = {
        "path": "a.csv",
        "user_id": "user",
        "pin_id": ids,
        "ts": {"column": "at", "unit": "s"},
        "action_type": "event",
        "surface": "place",
    }
    return Site.model_validate(
        {
            "name": "shop",
            "start_ds": "2026-01-01",
            "data_dir": str(root),
            "source": {"actions": actions, "pins": {"pin_id": ids, "vectors": {"npy": "v.npy", "ids": "i.npy"}}},
            "quality": {"trailing_days": 4},
        }
    )


def test_the_days_before_are_compared_as_far_as_they_exist(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    for ds in ("2026-01-15", "2026-01-16", "2026-01-18", "2026-01-19", DS, "2026-01-21"):
        write_json(partition_dir(site.directory, ds) / MANIFEST, manifest(ds))
    days = [day["ds"] for day in trailing_manifests(site, DS)]
    assert sorted(days) == ["2026-01-16", "2026-01-18", "2026-01-19"]  # four days back; the 17th is missing


def test_without_earlier_days_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    assert trailing_manifests(site_in(tmp_path), DS) == []
