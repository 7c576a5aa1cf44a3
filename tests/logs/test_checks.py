"""Data checks of raw_actions: each passes on a good manifest and fails on a doctored one."""

from pathlib import Path
from typing import Any

import pytest

from pf_core.config.site import QualityConfig, Site
from pf_core.days import shift_ds
from pf_core.logs.checks import is_newest_day, judge_quarantine, judge_volume, trailing_manifests
from pf_core.logs.partition import partition_dir
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import write_json
from tests.support.sites import make_site

DS = "2026-01-20"
QUALITY = QualityConfig(
    max_quarantined_share=0.02, trailing_days=14, min_trailing_days=3, min_volume_ratio=0.5, max_volume_ratio=2.0
)


def manifest(ds: str = DS, *, read: int = 1000, kept: int = 1000, quarantined: dict[str, int] | None = None) -> Any:
    rejects = quarantined or {}
    counts = dict.fromkeys(["received", "duplicates", "skipped", "sent", "forgotten"], 0)
    counts |= {"read": read, "kept": kept, "positive": kept, "quarantined": sum(rejects.values())}
    inputs = [{"path": f"{ds}.csv", "num_bytes": 1, "changed": 1}]
    return {
        "ds": ds,
        "counts": counts,
        "quarantined_by_reason": rejects,
        "inputs": inputs,
        "outside_site_days": 0,
    }


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
    assert verdict.reason == "900 actions, 0.90 times the median of the last 3 days with actions; normal is 0.5 to 2"


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


def test_an_empty_day_says_where_its_rows_are() -> None:
    doctored = manifest(read=0, kept=0)
    doctored["outside_site_days"] = 4029
    verdict = judge_volume(doctored, [], QUALITY)
    assert not verdict.passed
    assert verdict.reason == (
        "no actions at all, and 4,029 rows of the log are outside the site's days: check start_ds, end_ds and the unit "
        "of ts in the site file"
    )
    doctored = manifest(read=300, kept=0, quarantined={"a": 2})
    doctored["counts"] |= {"skipped": 298}
    assert judge_volume(doctored, [], QUALITY).reason == (
        "no actions at all: of 300 rows read, 298 skipped by a rule, 2 quarantined; check the mapping in the site file"
    )


@pytest.mark.parametrize("num_earlier", [0, 3])
def test_a_day_without_positive_actions_says_so(num_earlier: int) -> None:
    doctored = manifest(kept=1000)
    doctored["counts"]["positive"] = 0
    verdict = judge_volume(doctored, days_before(*[1000] * num_earlier), QUALITY)
    assert verdict.passed
    assert verdict.reason.endswith("; none of them is positive: check source.positive")
    assert "positive" not in judge_volume(manifest(kept=1000), days_before(*[1000] * num_earlier), QUALITY).reason


def test_the_first_days_have_nothing_to_compare_with() -> None:
    verdict = judge_volume(manifest(kept=5), days_before(1000, 1000), QUALITY)
    assert verdict.passed
    assert verdict.reason == "5 actions; only 2 earlier days to compare with"
    assert not judge_volume(manifest(kept=5), days_before(1000, 1000, 1000), QUALITY).passed


def test_days_without_actions_are_not_compared_with() -> None:
    """The median of days without actions is 0, and no setting would allow a multiple of it."""
    verdict = judge_volume(manifest(kept=5), days_before(0, 0, 0, 0, 0), QUALITY)
    assert verdict.passed
    assert verdict.reason == "5 actions; only 0 earlier days to compare with"
    trailing = days_before(0, 0, 0, 0, 1000, 1000, 1000)
    assert judge_volume(manifest(kept=500), trailing, QUALITY).passed
    assert not judge_volume(manifest(kept=499), trailing, QUALITY).passed
    assert not judge_volume(manifest(kept=2001), trailing, QUALITY).passed


# Weekdays


def weeks_before(num_weeks: int, *, same_weekday: int | list[int], others: int = 1000) -> list[Any]:
    """Days before DS, newest first; the newest of the list `same_weekday` is that of last week."""
    same = [same_weekday] * num_weeks if isinstance(same_weekday, int) else same_weekday
    return days_before(*(others if age % 7 else same[age // 7 - 1] for age in range(1, 7 * num_weeks + 1)))


@pytest.mark.parametrize(("kept", "passed"), [(99, False), (100, True), (200, True), (400, True), (401, False)])
def test_a_quiet_weekday_is_compared_with_its_own_past(kept: int, passed: bool) -> None:
    """DS is a Tuesday; Tuesdays have 200 actions and other days 1,000."""
    verdict = judge_volume(manifest(kept=kept), weeks_before(4, same_weekday=200), QUALITY)
    assert verdict.passed is passed
    assert verdict.reason == (
        f"{kept} actions, {kept / 200:.2f} times the median of the last 4 Tuesdays with actions; normal is 0.5 to 2"
    )


def test_too_few_days_of_a_weekday_leave_the_days_before() -> None:
    assert not judge_volume(manifest(kept=200), weeks_before(2, same_weekday=200), QUALITY).passed
    assert judge_volume(manifest(kept=200), weeks_before(3, same_weekday=200), QUALITY).passed
    not_by_weekday = QUALITY.model_copy(update={"trailing_weeks": 0})
    assert not judge_volume(manifest(kept=200), weeks_before(4, same_weekday=200), not_by_weekday).passed


def test_weeks_and_days_longer_ago_are_not_compared_with() -> None:
    long_ago = [manifest(shift_ds(DS, -7 * week), kept=200) for week in (5, 6, 7)]
    earlier = [*days_before(1000, 1000, 1000), *long_ago, manifest(shift_ds(DS, -15), kept=1)]
    assert judge_volume(manifest(kept=500), earlier, QUALITY).passed
    assert not judge_volume(manifest(kept=499), earlier, QUALITY).passed


@pytest.mark.parametrize(
    ("tuesdays", "closed"),
    [([0], False), ([0, 0], True), ([0, 900], False), ([0, 900, 0], True), ([0, 0, 900, 900], False), ([0] * 4, True)],
)
def test_a_closed_weekday_may_be_empty(tuesdays: list[int], closed: bool) -> None:
    """A shop that is closed on Tuesdays: most of at least two Tuesdays had no actions."""
    earlier = weeks_before(len(tuesdays), same_weekday=tuesdays)
    verdict = judge_volume(manifest(read=0, kept=0), earlier, QUALITY)
    assert verdict.passed is closed
    if closed:
        assert verdict.reason == f"no actions, as on {tuesdays.count(0)} of the last {len(tuesdays)} Tuesdays"
    assert judge_volume(manifest(kept=3), earlier, QUALITY).passed is closed  # a few actions of a closed day
    assert judge_volume(manifest(kept=1000), earlier, QUALITY).passed  # an exceptional opening
    assert not judge_volume(manifest(kept=2001), earlier, QUALITY).passed  # doubled logs of one


@pytest.mark.parametrize(("num_weeks", "passed"), [(0, True), (1, True), (2, False)])
def test_a_day_without_a_file_passes_until_its_weekday_is_known(num_weeks: int, passed: bool) -> None:
    """`missing_days: allow`: ingestion accepted the day, and there are no weeks that show whether it is usual."""
    earlier = weeks_before(num_weeks, same_weekday=1000) or days_before(1000, 1000, 1000)
    closed = manifest(read=0, kept=0) | {"inputs": []}
    verdict = judge_volume(closed, earlier, QUALITY)
    assert verdict.passed is passed
    if passed:
        known = f"only {num_weeks} earlier Tuesdays to compare with"
        assert verdict.reason == f"no file, which `missing_days: allow` permits; {known}"
    assert judge_volume(manifest(kept=3) | {"inputs": []}, earlier, QUALITY).passed is passed  # a few late rows
    assert not judge_volume(manifest(read=0, kept=0), earlier, QUALITY).passed  # a file without rows


def test_the_day_after_a_closed_day_is_compared_with_open_days() -> None:
    earlier = days_before(*(0 if age % 7 == 1 else 1000 for age in range(1, 29)))
    assert judge_volume(manifest(kept=1000), earlier, QUALITY).passed
    assert not judge_volume(manifest(read=0, kept=0), earlier, QUALITY).passed


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


def test_the_same_weekday_of_past_weeks_is_compared_too(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    for age in range(1, 36):
        write_json(partition_dir(site.directory, shift_ds(DS, -age)) / MANIFEST, manifest(shift_ds(DS, -age)))
    ages = [1, 2, 3, 4, 7, 14, 21, 28]
    assert [day["ds"] for day in trailing_manifests(site, DS)] == [shift_ds(DS, -age) for age in ages]


# Newest day


@pytest.mark.parametrize(("log_age", "newest"), [(-1, True), (0, True), (1, True), (2, False), (7, False), (8, True)])
def test_a_day_is_not_the_newest_if_logs_of_later_days_exist(tmp_path: Path, log_age: int, newest: bool) -> None:
    """The log of the next day may be in the making."""
    site = make_site(tmp_path, path="logs/{ds}/*.csv")
    log = tmp_path / "logs" / shift_ds(DS, log_age) / "a.csv"
    log.parent.mkdir(parents=True)
    log.touch()
    assert is_newest_day(site, DS) is newest


def test_the_last_day_of_a_site_is_its_newest(tmp_path: Path) -> None:
    site = make_site(tmp_path, path="logs/{ds}.csv", end_ds=DS)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{shift_ds(DS, 2)}.csv").touch()
    assert is_newest_day(site, DS)


@pytest.mark.parametrize("path", ["logs/all.csv", "logs/{ds}.csv"])
def test_a_day_is_not_the_newest_if_a_later_one_is_ingested(tmp_path: Path, path: str) -> None:
    site = make_site(tmp_path, path=path)
    for ds in (shift_ds(DS, -1), DS):
        write_json(partition_dir(site.directory, ds) / MANIFEST, manifest(ds))
    assert is_newest_day(site, DS)
    assert not is_newest_day(site, shift_ds(DS, -1))
