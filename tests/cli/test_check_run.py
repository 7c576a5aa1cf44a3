"""`pf check` sees the days that a run would build, and foresees whether it could train on them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pf_core.days import ds_start_us, shift_ds
from tests.support.shop_site import check, message_of, shop_rows, write_log, write_site

# Too little to train on


def test_too_few_users_are_an_error(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    site = write_site(tmp_path, training={})
    result = check(site)
    assert result.exit_code == 1
    assert "error: the log is too small to train on: 3 users and 6 actions on 1 day" in result.output
    write_log(tmp_path / "2024-03-04.csv")
    site = write_site(tmp_path, training={}, actions={"path": "{ds}.csv"})
    assert check(site, "--ds", "2024-03-04").exit_code == 0, "a single day does not tell"


def test_a_preset_that_reads_vectors_needs_them(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", shop_rows("2024-03-04", num_days=14))
    result = check(write_site(tmp_path, pins={}, training={"preset": "tiny"}))
    assert result.exit_code == 1
    assert "error: preset tiny reads content vectors, and the site has none; set training.preset to auto" in (
        result.output
    )


def test_too_few_pins_are_a_warning(tmp_path: Path) -> None:
    """A model of 3 pins can be trained and released."""
    write_log(tmp_path / "a.csv", shop_rows("2024-03-04", num_days=14, num_pins=3))
    site = write_site(tmp_path, pins={}, training={})
    result = check(site)
    assert result.exit_code == 0, message_of(result)
    warning = "the log has too little to learn from: 3 pins and "
    assert f"warning    {warning}" in result.output
    assert "with a factor dim of 0 instead of 32 or more, which needs 128 of each" in result.output
    report = json.loads(check(site, "--json").output)
    assert report["problems"] == []
    assert report["warnings"][0].startswith(warning)


# The last day


def day(days_ago: int) -> str:
    return shift_ds(datetime.now(UTC).date().isoformat(), -days_ago)


def test_a_log_without_an_end_is_read_until_yesterday(tmp_path: Path) -> None:
    """14 days until yesterday, and 51 rows of 2031 or of today, which is not over: a run does not see them either."""
    late_s = ds_start_us("2031-01-01") // 1_000_000
    rows = shop_rows(day(14), num_days=14)
    stray = [f"{900 + number},7,{late_s},vue" for number in range(50)] + [f"999,7,{ds_start_us(day(0)) // 10**6},vue"]
    write_log(tmp_path / "a.csv", [*rows, *stray])
    result = check(write_site(tmp_path, pins={}, training={}, start_ds=day(14), end_ds=None))
    assert result.exit_code == 0, message_of(result)
    assert f"560 positive, 0 skipped by a rule, 51 outside the site's days ({day(0)} to 2031-01-01)," in (
        result.output.replace("560 kept, 560 of them positive", "560 positive")
    )
    assert f"14 with rows from {day(14)} to {day(1)}, " in result.output
    assert f"users: 40, all with an action until {day(1)} " in result.output
    assert f"users until {day(4)}; 3 days after it judge the model" in result.output  # a quarter of 14 days
    assert "warning" not in result.output


@pytest.mark.parametrize(("num_days", "is_warned"), [(11, True), (14, False)])
def test_a_log_that_ends_before_yesterday_needs_an_end(tmp_path: Path, num_days: int, is_warned: bool) -> None:
    write_log(tmp_path / "a.csv", shop_rows(day(14), num_days=num_days))
    result = check(write_site(tmp_path, pins={}, training={}, start_ds=day(14), end_ds=None))
    assert result.exit_code == 0, message_of(result)
    warning = (
        f"warning    the newest rows that were read are of {day(4)}, and the site file has no `end_ds`: the days from "
        f"{day(3)} to {day(1)} would be built without rows, and the volume check would stop the run; set `end_ds: "
        f"{day(4)}`, or"
    )
    assert (warning in result.output) == is_warned
    assert ("warning" in result.output) == is_warned
    result = check(write_site(tmp_path, pins={}, training={}, start_ds=day(14), end_ds=day(4)))
    assert "warning" not in result.output


def test_a_dated_log_whose_days_are_long_over_needs_an_end(tmp_path: Path) -> None:
    write_log(tmp_path / "2024-03-04.csv")
    result = check(write_site(tmp_path, actions={"path": "{ds}.csv"}, start_ds="2024-03-04", end_ds=None))
    assert result.exit_code == 1
    assert "error: no log of a day from " in result.output
    assert "; set end_ds to the last day of the logs" in result.output
