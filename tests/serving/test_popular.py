"""The popular pins of a release: user-days of the last week, of the index's pins only."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pf_core.days import ds_range, shift_ds
from pf_core.hashing import is_held_out
from pf_core.serving.client import Serving
from pf_core.serving.index import require_index
from pf_core.serving.popular import open_week, popular_pins
from tests.support.releases import NUM_BUCKETS, publish, write_day
from tests.support.sites import START, Row, SmallSite

DAYS = ds_range(START, shift_ds(START, 8))
DAY_S = 86_400
USERS = range(40)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallSite]:
    site = SmallSite(tmp_path, {"timelines": {"num_buckets": NUM_BUCKETS}})
    yield site
    site.engine.__exit__(None, None, None)


def log(day: int) -> list[Row]:
    """Each user sees a few pins, some of them twice a day; pins without a vector are not in the index."""
    return [
        (user, f"pin{(user * user + day * number) % 50:02d}", day * DAY_S + 100.0 * user + number, "look")
        for user in USERS
        for number in range(1 + user % 4)
    ]


def write_days(small: SmallSite) -> None:
    for day, ds in enumerate(DAYS):
        small.write_log(ds, log(day))
    small.ingest(DAYS)


def expected(*, forgotten: tuple[int, ...] = ()) -> list[tuple[str, int]]:
    """Pins and user-days of the last seven days by counting, most first."""
    held_out = dict(zip(USERS, is_held_out(pa.array(USERS), 0.1), strict=True))
    assert 0 < sum(held_out.values()) < len(USERS)
    pairs = {
        (user, pin, day)
        for day in range(2, 9)
        for user, pin, *_ in log(day)
        if not held_out[user] and user not in forgotten and pin < "pin40"
    }
    counts = Counter(pin for _, pin, _ in pairs)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def test_a_release_has_the_popular_pins_of_the_week(small: SmallSite) -> None:
    write_days(small)
    write_day(small.site, DAYS[8], list(USERS), version=1)
    publish(small.site, DAYS[8])
    release = Serving(small.site).release()
    hits = release.popular(k=1000)
    assert [(hit.pin_id, hit.score) for hit in hits] == expected()
    assert release.popular(k=3) == hits[:3]
    assert {(hit.source, hit.interest) for hit in hits} == {("popular", "interest-1")}
    _, index_folder = require_index(small.site, DAYS[8])
    table = popular_pins(small.site, open_week(small.site, DAYS[8]), index_folder, 2)
    assert list(zip(table["pin_id"].to_pylist(), table["user_days"].to_pylist(), strict=True)) == expected()[:2]


def test_forgotten_users_do_not_count_and_a_changed_log_is_published_again(small: SmallSite) -> None:
    write_days(small)
    write_day(small.site, DAYS[8], list(USERS), version=1)
    first = publish(small.site, DAYS[8])
    assert publish(small.site, DAYS[8]) == first
    (small.root / "forget.txt").write_text("7\n")
    publish(small.site, DAYS[8])
    hits = Serving(small.site).release().popular(k=1000)
    assert [(hit.pin_id, hit.score) for hit in hits] == expected(forgotten=(7,)) != expected()
    small.write_log(DAYS[8], log(8)[:5])
    small.ingest(DAYS[8:])
    again = publish(small.site, DAYS[8])
    assert again["release"] == "2026-01-09.3"
    assert again["inputs"]["popular"] != first["inputs"]["popular"]
