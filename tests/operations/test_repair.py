"""The plan of a repair: what it counts, and what it reads for that."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pf_core.days import ds_range
from pf_core.embeddings.tables import embedding_state
from pf_core.engine.daily_state import create_bucket
from pf_core.operations.repair import plan_repair
from tests.support.releases import split_rows, user_rows
from tests.support.sites import START, SmallSite

NUM_BUCKETS = 8
DAYS = ds_range(START, "2026-01-04")
USERS = list(range(40))


@pytest.fixture
def small(tmp_path: Path) -> SmallSite:
    """All users are embedded on four days; the first ten have an action on the second day, the others on the first."""
    small = SmallSite(tmp_path, {"timelines": {"num_buckets": NUM_BUCKETS}, "late_days": 0})
    small.write_log(DAYS[0], [(user, "p", 10, "save") for user in USERS[10:]])
    small.write_log(DAYS[1], [(user, "p", 86_400 + 10, "save") for user in USERS[:10]])
    for ds in DAYS[2:]:
        small.write_log(ds, [])
    small.ingest(DAYS)
    state = embedding_state(small.site)
    for ds in DAYS:
        versions = [
            create_bucket(state.bucket_path(bucket), rows).version
            for bucket, rows in split_rows(user_rows(USERS, version=1), NUM_BUCKETS)
        ]
        state.publish(ds, versions, {"mode": "everyone"})
    return small


def test_users_and_their_embeddings_are_counted(small: SmallSite) -> None:
    plan = plan_repair(small.site, since=DAYS[1], until=DAYS[1])
    assert plan.raw_days == [DAYS[1]]
    assert plan.embedding_days == DAYS[1:]
    assert plan.users == 10
    assert plan.embeddings == 10 * len(DAYS[1:])


def test_the_manifest_of_a_day_is_not_read_for_every_bucket(small: SmallSite, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[Path] = Counter()
    original = Path.open

    def counting(self: Path, *arguments: Any, **options: Any) -> Any:
        reads[self] += 1
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", counting)
    plan = plan_repair(small.site, since=DAYS[1], until=DAYS[1])
    assert plan.embeddings == 30
    state = embedding_state(small.site)
    assert [reads[state.manifest_path(ds)] for ds in DAYS] == [0, 2, 1, 1]  # the first day's mode is looked at, too


def test_an_empty_day_has_no_users(small: SmallSite) -> None:
    plan = plan_repair(small.site, since=DAYS[3], until=DAYS[3])
    assert (plan.users, plan.embeddings) == (0, 0)
