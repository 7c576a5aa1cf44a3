"""Reading a site's log: against a direct query of raw_actions, what must not leak, what is refused, and tuning."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.benchmark.baselines import BASELINES
from pf_core.benchmark.log import Actions, BenchmarkLog, tuning_log
from pf_core.benchmark.reading import SAMPLE_KEY, read_log
from pf_core.config.site import Site
from pf_core.config.source import PinsSource
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range, parse_ds, shift_ds
from pf_core.errors import PipelineError
from pf_core.hashing import hashed_uniform, is_held_out
from pf_core.logs.partition import bucket_files, ingested_days
from pf_core.pins.features import read_pin_features
from tests.support.shared import SharedSites
from tests.support.sites import START, Row, SmallSite
from tests.support.tiny_world import EVALUATION_DAYS, make_tiny_site

DAY_S = 86_400.0
HALF = 0.5


def silent(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def tiny(shared_sites: SharedSites) -> Site:
    return shared_sites.get("tiny-world", make_tiny_site)


@pytest.fixture(scope="module")
def tiny_log(tiny: Site) -> BenchmarkLog:
    return read_log(tiny, name="tiny", cut_ds=cut_of(tiny), num_days=EVALUATION_DAYS, progress=silent)


def cut_of(site: Site) -> str:
    return shift_ds(ingested_days(site)[-1], -EVALUATION_DAYS)


def query(site: Site, cut_ds: str, sql: str) -> list[tuple[Any, ...]]:
    """Run SQL on `actions` (user_id, pin_id, ds, ts, is_positive, is_test) and `pins` of the cut."""
    files = {str(path): ds for ds in ingested_days(site) for path in bucket_files(site, ds).values()}
    with duckdb.connect() as connection:
        connection.register("file_days", pa.table({"filename": list(files), "ds": list(files.values())}))
        connection.register("pins", read_pin_features(site, cut_ds, ["pin_id"]))
        read = f"read_parquet({list(files)}, filename = true)"
        ids = connection.sql(f"SELECT DISTINCT user_id FROM {read}").to_arrow_table()["user_id"].combine_chunks()
        held_out = pa.array(is_held_out(ids, site.training.held_out_share))
        connection.register("users", pa.table({"user_id": ids, "is_test": held_out}))
        connection.execute(
            f"""CREATE TABLE actions AS SELECT user_id, pin_id, ds, ts, is_test, surface = 'homefeed' AND (
                action_type = 'repin' OR action_type IN ('closeup', 'click') AND duration_s > 10) AS is_positive
            FROM {read} JOIN file_days USING (filename) JOIN users USING (user_id)"""
        )
        return connection.execute(sql).fetchall()


# Against a direct query


def test_a_log_has_the_counts_of_a_direct_query(tiny: Site, tiny_log: BenchmarkLog) -> None:
    log, cut = tiny_log, cut_of(tiny)
    assert log.notes == ()
    [(actions, positives, users)] = query(
        tiny,
        cut,
        f"""SELECT count(*), count(*) FILTER (is_positive), count(DISTINCT user_id) FROM actions
        WHERE NOT is_test AND ds <= '{cut}'""",
    )
    assert (len(log.train.user), int(log.train.is_positive.sum()), len(log.train_user_ids)) == (
        actions,
        positives,
        users,
    )
    index = f"SELECT pin_id FROM actions WHERE ds <= '{cut}' UNION SELECT pin_id FROM pins"
    assert log.pin_ids.to_pylist() == [pin for (pin,) in query(tiny, cut, f"{index} ORDER BY 1")]
    [(num_cold,)] = query(
        tiny, cut, f"SELECT count(*) FROM pins WHERE pin_id NOT IN (SELECT pin_id FROM actions WHERE ds <= '{cut}')"
    )
    assert int(log.is_cold_pin.sum()) == num_cold > 0
    per_user = query(
        tiny,
        cut,
        f"""SELECT user_id, count(DISTINCT pin_id) FILTER (pin_id IN ({index})),
        count(DISTINCT pin_id) FILTER (pin_id NOT IN ({index}))
        FROM actions WHERE is_test AND is_positive AND ds > '{cut}' GROUP BY user_id ORDER BY user_id""",
    )
    assert log.test_user_ids.to_pylist() == [user for user, _, _ in per_user]
    num_askable = np.bincount(log.positive_user_P, minlength=len(per_user))
    assert num_askable.tolist() == [num for _, num, _ in per_user]
    assert log.num_unaskable_U.tolist() == [num for _, _, num in per_user]
    assert log.num_unaskable_U.sum() > 0


def test_every_action_of_a_log_is_in_the_files_in_the_order_of_time(tiny: Site, tiny_log: BenchmarkLog) -> None:
    cut = cut_of(tiny)
    for actions, user_ids, condition in (
        (tiny_log.train, tiny_log.train_user_ids, "NOT is_test"),
        (tiny_log.past, tiny_log.test_user_ids, "is_test"),
    ):
        ids = set(user_ids.to_pylist())
        rows = query(
            tiny,
            cut,
            f"""SELECT user_id, pin_id, ds, is_positive, ts FROM actions WHERE {condition} AND ds <= '{cut}'
            ORDER BY user_id, ts""",
        )
        expected = [row for row in rows if row[0] in ids]
        days = [(parse_ds(ds) - parse_ds(cut)).days - 1 for _, _, ds, _, _ in expected]
        assert user_ids.take(pa.array(actions.user)).to_pylist() == [row[0] for row in expected]
        assert actions.day.tolist() == days
        assert max(days) == -1
        pins = tiny_log.pin_ids.take(pa.array(actions.pin)).to_pylist()
        # Actions of a user at the same moment have no order.
        users = user_ids.take(pa.array(actions.user)).to_pylist()
        found = sorted(zip(users, pins, actions.is_positive.tolist(), strict=True))
        assert found == sorted((user, pin, is_positive) for user, pin, _, is_positive, _ in expected)


def test_a_long_log_is_a_sample_of_its_users(tiny: Site, tiny_log: BenchmarkLog) -> None:
    cut = cut_of(tiny)
    [(num_actions,)] = query(tiny, cut, f"SELECT count(*) FROM actions WHERE ds <= '{cut}'")
    log = read_log(
        tiny, name="tiny", cut_ds=cut, num_days=EVALUATION_DAYS, progress=silent, max_actions=num_actions // 2
    )
    share = (num_actions // 2) / num_actions
    assert log.notes == (
        f"50.0% of the users were sampled by hash, test users too: the log has {num_actions:,} actions up to the cut, "
        f"more than {num_actions // 2:,}.",
    )
    for sampled, whole in ((log.train_user_ids, tiny_log.train_user_ids), (log.test_user_ids, tiny_log.test_user_ids)):
        assert sampled.to_pylist() == whole.filter(pa.array(hashed_uniform(whole, SAMPLE_KEY) < share)).to_pylist()
        assert 0 < len(sampled) < len(whole)
    assert log.pin_ids.equals(tiny_log.pin_ids)
    kept = np.isin(tiny_log.train_user_ids.to_numpy(zero_copy_only=False), log.train_user_ids.to_pylist())
    assert log.train.pin.tolist() == tiny_log.train.pin[kept[tiny_log.train.user]].tolist()
    assert log.train.user.tolist() == (np.cumsum(kept) - 1)[tiny_log.train.user[kept[tiny_log.train.user]]].tolist()


# A small site


def users_of(is_test: bool, num: int) -> list[int]:
    ids = pa.array(range(1000))
    return ids.filter(pa.array(is_held_out(ids, HALF) == is_test)).to_pylist()[:num]


(JUDGE, IDLE), (TEACHER, OTHER) = users_of(True, 2), users_of(False, 2)
CUT = shift_ds(START, 1)
ROWS: list[Row] = [
    (TEACHER, "a", 1, "look"),
    (TEACHER, "a", 2, "look"),
    (OTHER, "b", 3, "go"),
    (JUDGE, "c", 4, "look"),
    (IDLE, "d", DAY_S + 1, "look"),
    (JUDGE, "a", DAY_S + 2, "look"),
    (JUDGE, "a", 2 * DAY_S + 1, "look"),
    (JUDGE, "a", 2 * DAY_S + 2, "save"),
    (JUDGE, "new", 2 * DAY_S + 3, "look"),
    (OTHER, "a", 2 * DAY_S + 4, "look"),
    (TEACHER, "z", 2 * DAY_S + 5, "look"),
]


def make_site(small_site: Callable[..., SmallSite], rows: list[Row], *, share: float = HALF, num_days: int = 3) -> Site:
    site = small_site()
    site.site = site.site.model_copy(update={"training": TrainingConfig(held_out_share=share, evaluation_days=1)})
    days = ds_range(START, shift_ds(START, num_days - 1))
    for number, ds in enumerate(days):
        site.write_log(ds, [row for row in rows if row[2] // DAY_S == number])
    site.ingest(days)
    return site.site


def read(site: Site, *, cut_ds: str = CUT, num_days: int = 1) -> BenchmarkLog:
    return read_log(site, name="small", cut_ds=cut_ds, num_days=num_days, progress=silent)


def plain(actions: Actions, log: BenchmarkLog, user_ids: pa.Array) -> list[tuple[Any, ...]]:
    users, pins = user_ids.take(pa.array(actions.user)), log.pin_ids.take(pa.array(actions.pin))
    return list(
        zip(users.to_pylist(), pins.to_pylist(), actions.day.tolist(), actions.is_positive.tolist(), strict=True)
    )


def test_a_small_log(small_site: Callable[..., SmallSite]) -> None:
    log = read(make_site(small_site, ROWS))
    assert log.pin_ids.to_pylist() == ["a", "b", "c", "d"]  # d by a held-out user who is not asked
    assert log.train_user_ids.to_pylist() == sorted([TEACHER, OTHER])
    trained = [(TEACHER, "a", -2, True), (TEACHER, "a", -2, True), (OTHER, "b", -2, True)]
    assert plain(log.train, log, log.train_user_ids) == sorted(trained)
    assert log.test_user_ids.to_pylist() == [JUDGE]
    assert plain(log.past, log, log.test_user_ids) == [(JUDGE, "c", -2, True), (JUDGE, "a", -1, True)]
    assert (log.positive_user_P.tolist(), log.positive_pin_P.tolist()) == ([0], [0])
    assert log.num_unaskable_U.tolist() == [1]
    assert not log.is_cold_pin.any()
    assert log.notes == (f"pin_features has no partition {CUT}: the index has only pins with an action up to the cut.",)


def test_pins_of_an_undated_catalogue_are_in_the_index_with_or_without_a_vector(
    small_site: Callable[..., SmallSite],
) -> None:
    site = make_site(small_site, ROWS)
    pq.write_table(pa.table({"pin": ["a", "new", "never"]}), site.log_root / "pins.parquet")
    pins = {"catalogue": {"path": "pins.parquet"}, "pin_id": {"column": "pin", "type": "string"}}
    described = PinsSource.model_validate(pins)
    source = site.source.model_copy(update={"pins": described})
    log = read(site.model_copy(update={"source": source}))
    assert log.pin_ids.to_pylist() == ["a", "b", "c", "d", "never", "new"]
    assert log.is_cold_pin.tolist() == [False, False, False, False, True, True]
    assert log.num_unaskable_U.tolist() == [0]
    assert log.notes == ("The catalogue has no dates: all its pins count as known at the cut.",)


@pytest.mark.parametrize(
    "planted",
    [
        (JUDGE, "b", 5.0, "look"),  # a test user's action before the cut
        (IDLE, "a", DAY_S + 5, "look"),
        (JUDGE, "b", 2 * DAY_S + 9, "look"),  # after the cut
        (IDLE, "c", 2 * DAY_S + 9, "look"),
        (TEACHER, "b", 2 * DAY_S + 9, "look"),  # a training user's action after the cut
    ],
)
def test_no_planted_action_reaches_what_is_learned(small_site: Callable[..., SmallSite], planted: Row) -> None:
    before, after = (read(make_site(small_site, rows)) for rows in (ROWS, [*ROWS, planted]))
    for field in fields(Actions):
        assert getattr(after.train, field.name).tolist() == getattr(before.train, field.name).tolist()
    assert after.train_user_ids.equals(before.train_user_ids)
    for name in ("popularity, 7 days", "popularity, 28 days", "popularity, ever"):
        one, other = BASELINES[name](before), BASELINES[name](after)
        length = len(before.pin_ids)
        assert one.pin[:length].tolist() == other.pin[:length].tolist()
        assert one.score[:length].tolist() == other.score[:length].tolist()


def test_a_planted_action_of_a_training_user_is_found(small_site: Callable[..., SmallSite]) -> None:
    log = read(make_site(small_site, [*ROWS, (OTHER, "c", DAY_S + 9, "look")]))
    assert (OTHER, "c", -1, True) in plain(log.train, log, log.train_user_ids)


def test_forgotten_users_are_left_out(small_site: Callable[..., SmallSite]) -> None:
    site = make_site(small_site, ROWS)
    assert site.deletion_list is not None
    Path(site.deletion_list).write_text(f"{OTHER}\n")
    assert read(site).train_user_ids.to_pylist() == [TEACHER]


def test_a_test_user_without_a_past_is_asked(small_site: Callable[..., SmallSite]) -> None:
    log = read(make_site(small_site, [*ROWS, (IDLE, "d", 2 * DAY_S + 9, "look")]))
    assert log.test_user_ids.to_pylist() == sorted([JUDGE, IDLE])
    log = read(make_site(small_site, [row for row in ROWS if row[0] != JUDGE] + [(JUDGE, "a", 2 * DAY_S + 9, "look")]))
    assert (log.test_user_ids.to_pylist(), len(log.past.user)) == ([JUDGE], 0)


# Bad input


def test_without_positives_after_the_cut(small_site: Callable[..., SmallSite]) -> None:
    site = make_site(small_site, [row for row in ROWS if row[2] < 2 * DAY_S])
    with pytest.raises(PipelineError, match=f"no action in the 1 days after the cut {CUT} is positive"):
        read(site)


def test_without_a_held_out_user(small_site: Callable[..., SmallSite]) -> None:
    site = make_site(small_site, ROWS, share=0.0)
    with pytest.raises(PipelineError, match="none of the 4 users is held out") as error:
        read(site)
    assert "raise training.held_out_share" in str(error.value)


def test_without_a_positive_of_a_held_out_user(small_site: Callable[..., SmallSite]) -> None:
    site = make_site(small_site, [row for row in ROWS if row[0] != JUDGE or row[2] < 2 * DAY_S])
    with pytest.raises(PipelineError, match="none of the 2 held-out users has a positive action"):
        read(site)


@pytest.mark.parametrize("user", [JUDGE, TEACHER])
def test_one_user(small_site: Callable[..., SmallSite], user: int) -> None:
    site = make_site(small_site, [(user, "a", 1, "look"), (user, "b", DAY_S, "look"), (user, "a", 2 * DAY_S, "look")])
    if user == TEACHER:
        with pytest.raises(PipelineError, match="none of the 1 users is held out"):
            read(site)
        return
    log = read(site)
    assert (len(log.train.user), len(log.train_user_ids), log.test_user_ids.to_pylist()) == (0, 0, [JUDGE])
    assert "No training user has an action up to the cut: nothing can be learned from others." in log.notes


@pytest.mark.parametrize(
    ("cut_ds", "num_days", "message"),
    [
        (shift_ds(START, 2), 1, "no day after the cut"),
        (CUT, 0, "no day after the cut"),
        (shift_ds(START, -1), 1, f"begins with {START}, after the cut"),
        (CUT, 2, f"lacks 1 of the days {START} to {shift_ds(START, 3)}, the first is {shift_ds(START, 3)}"),
    ],
)
def test_days_that_are_not_there(
    small_site: Callable[..., SmallSite], cut_ds: str, num_days: int, message: str
) -> None:
    site = make_site(small_site, ROWS)
    with pytest.raises(PipelineError, match=message):
        read(site, cut_ds=cut_ds, num_days=num_days)


# Tuning


def test_a_tuning_log_is_made_of_the_training_users_alone(tiny_log: BenchmarkLog) -> None:
    log, tuning = tiny_log, tuning_log(tiny_log, share=0.3, seed=5)
    assert tuning.cut_ds == shift_ds(log.cut_ds, -log.num_days)
    train = set(log.train_user_ids.to_pylist())
    judges, taught = set(tuning.test_user_ids.to_pylist()), set(tuning.train_user_ids.to_pylist())
    assert judges | taught <= train
    assert not judges & taught
    chosen = hashed_uniform(log.train_user_ids, 5) < 0.3
    assert judges <= set(log.train_user_ids.filter(pa.array(chosen)).to_pylist())
    assert 0.2 < len(judges) / len(train) < 0.4
    rows = plain(log.train, log, log.train_user_ids)
    early = [
        (user, pin, day + log.num_days, is_positive) for user, pin, day, is_positive in rows if day < -log.num_days
    ]
    is_chosen = dict(zip(log.train_user_ids.to_pylist(), chosen.tolist(), strict=True))
    assert plain(tuning.train, tuning, tuning.train_user_ids) == [row for row in early if not is_chosen[row[0]]]
    assert plain(tuning.past, tuning, tuning.test_user_ids) == [row for row in early if row[0] in judges]
    assert tuning.pin_ids.to_pylist() == sorted({pin for _, pin, _, _ in early})
    late = {(user, pin) for user, pin, day, is_positive in rows if day >= -log.num_days and is_positive}
    late = {(user, pin) for user, pin in late if is_chosen[user]}
    known = set(tuning.pin_ids.to_pylist())
    user_ids, pin_ids = tuning.test_user_ids.to_pylist(), tuning.pin_ids.to_pylist()
    asked = zip(tuning.positive_user_P.tolist(), tuning.positive_pin_P.tolist(), strict=True)
    assert {(user_ids[user], pin_ids[pin]) for user, pin in asked} == {pair for pair in late if pair[1] in known}
    assert tuning.num_unaskable_U.sum() == sum(pin not in known for _, pin in late)
    assert judges == {user for user, _ in late}


def test_tuning_knows_nothing_of_the_test(tiny_log: BenchmarkLog) -> None:
    log = tiny_log
    none = np.zeros(0, np.int32)
    nobody = Actions(user=none, pin=none, day=none, is_positive=none.astype(bool))
    blind = BenchmarkLog(**{**log.__dict__, "past": nobody, "positive_user_P": none, "positive_pin_P": none})
    one, other = tuning_log(log), tuning_log(blind)
    for name in ("positive_user_P", "positive_pin_P", "num_unaskable_U"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert one.train.pin.tolist() == other.train.pin.tolist()
    assert one.pin_ids.equals(other.pin_ids)


def test_a_log_too_short_for_tuning(small_site: Callable[..., SmallSite]) -> None:
    log = read(make_site(small_site, ROWS))
    with pytest.raises(PipelineError, match="none of the 2 users chosen by hash has a positive in the last 1 days"):
        tuning_log(log, share=1.0)
    short = BenchmarkLog(**{**log.__dict__, "num_days": 2})
    with pytest.raises(PipelineError, match="none acted more than 2 days before the cut"):
        tuning_log(short)
