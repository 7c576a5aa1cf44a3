"""The question after the cut: its users and positives, what is left out, and what each frequency reads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pf_core.config.serving import Frequency, PromotionConfig
from pf_core.config.site import Site
from pf_core.config.source import PinsSource
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from pf_core.evaluation import queries as frequencies
from pf_core.evaluation import question as evaluation
from pf_core.evaluation.embedders import CONTENT_BASELINES
from pf_core.evaluation.protocol import score_baseline
from pf_core.evaluation.queries import Queries, ask
from pf_core.evaluation.question import open_question
from pf_core.evaluation.vector_coverage import vector_coverage
from pf_core.hashing import is_held_out
from pf_core.pins.features import build_pin_features
from pf_core.training.build_set import build_training_set
from pf_core.training.training_set import TrainingSet, latest_training_set, open_training_set
from tests.support.judging import CUT, LAST, NUM_PINS, make_judged_site
from tests.support.planted import write_planted_set
from tests.support.questions import draw_question
from tests.support.sites import START, SmallSite

SECOND_DAY = shift_ds(START, 1)
DAY_S = 86_400.0


def silent(message: str) -> None:
    pass


def write_pins(site: SmallSite, ds: str, pins: dict[str, list[float]]) -> None:
    path = site.root / "pins" / f"{ds}.parquet"
    path.parent.mkdir(exist_ok=True)
    vectors = pa.array(list(pins.values()), pa.list_(pa.float32()))
    pq.write_table(pa.table({"pin": pa.array(list(pins), pa.string()), "vector": vectors}), path)


# A site's question


def test_a_question_is_asked_of_one_version_of_the_log(
    monkeypatch: pytest.MonkeyPatch, small_site: Callable[..., SmallSite]
) -> None:
    """The log is read twice, for the users with positives and for their actions; meanwhile a day is ingested again."""
    site = small_site()
    site.site = site.site.model_copy(update={"training": TrainingConfig(held_out_share=0.5, evaluation_days=1)})
    users = pa.array(range(100))
    judge, other, *_ = users.filter(pa.array(is_held_out(users, 0.5))).to_pylist()
    taught, *_ = users.filter(pa.array(~is_held_out(users, 0.5))).to_pylist()
    write_pins(site, START, {"a": [1, 0], "b": [0, 1]})
    write_pins(site, SECOND_DAY, {})
    site.write_log(START, [(user, "a", 1, "look") for user in (judge, other, taught)])
    site.write_log(SECOND_DAY, [(judge, "b", DAY_S, "look")])
    site.ingest([START, SECOND_DAY])
    list(build_pin_features(site.site, [START, SECOND_DAY], engine=site.engine, progress=silent))
    site.build([START, SECOND_DAY])
    build_training_set(site.site, cut_ds=None, engine=site.engine, progress=silent)
    data = open_training_set(latest_training_set(site.site))
    read_later = evaluation._read_later

    def meddle(*arguments: object) -> object:
        found = read_later(*arguments)
        site.write_log(SECOND_DAY, [(other, "b", DAY_S, "look")])
        site.ingest([SECOND_DAY])
        return found

    monkeypatch.setattr(evaluation, "_read_later", meddle)
    with pytest.raises(PipelineError, match="was ingested again while the evaluation's question was made from it; "):
        open_question(site.site, data, progress=silent)
    monkeypatch.undo()
    assert open_question(site.site, data, progress=silent).user_ids.to_pylist() == [other]


def test_the_question_is_what_held_out_users_liked_after_the_cut(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    site.site = site.site.model_copy(update={"training": TrainingConfig(held_out_share=0.5, evaluation_days=1)})
    users = pa.array(range(100))
    judge, idle, *_ = users.filter(pa.array(is_held_out(users, 0.5))).to_pylist()
    taught, newcomer, *_ = users.filter(pa.array(~is_held_out(users, 0.5))).to_pylist()
    write_pins(site, START, {"a": [1, 0], "b": [0, 1]})
    write_pins(site, SECOND_DAY, {"fresh": [1, 1]})
    first = [(judge, "a", 1, "look"), (taught, "b", 2, "look"), (taught, "a", 3, "look"), (idle, "a", 4, "look")]
    site.write_log(START, first)
    later = [(judge, "b", 5, "look"), (judge, "b", 9, "look"), (judge, "fresh", 6, "look")]
    later += [(taught, "a", 7, "look"), (newcomer, "a", 8, "look")]
    site.write_log(SECOND_DAY, [(user, pin, DAY_S + second, event) for user, pin, second, event in later])
    days = [START, SECOND_DAY]
    site.ingest(days)
    site.build(days)
    list(build_pin_features(site.site, days, engine=site.engine, progress=silent))
    build_training_set(site.site, cut_ds=None, engine=site.engine, progress=silent)
    data = open_training_set(latest_training_set(site.site))

    lines: list[str] = []
    question = open_question(site.site, data, progress=lines.append)
    assert question.user_ids.to_pylist() == [judge]
    assert question.timelines.pin.tolist() == [0, 1, 1]  # a, then b twice; `fresh` was unknown at the cut
    assert question.positive_A.tolist() == [1, 2]
    assert question.index_pin.tolist() == [0, 1]
    assert question.counts == {
        "held_out_users": 2,
        "users": 1,
        "users_without_positives": 1,
        "positives": 2,
        "positives_of_unknown_users": 1,
        "positives_with_unknown_words": 0,
        "unaskable_positives": 1,
    }
    moment = data.cut_us + 6_000_000
    assert [each.tolist() for each in question.unaskable] == [[0], [moment], [-1], [0], [moment]]
    assert question.share_unaskable == 1 / 2  # b and fresh
    assert lines == [
        "50.0% of the positives are on pins that are unknown at the cut and count as misses (1 actions): 1 held-out "
        f"users with 2 positives on other pins in the 1 days after {START}, index of 2 pins"
    ]
    assert question.last_ds == SECOND_DAY
    assert data.interests().tolist() == [0, 0]


def test_positives_without_a_vector_are_part_of_the_question(small_site: Callable[..., SmallSite]) -> None:
    """The first user finds a pin with a vector, one without, and two that were unknown at the cut; the second one finds
    one without a vector and one that was unknown; the third one is idle."""
    site = small_site()
    site.site = site.site.model_copy(update={"training": TrainingConfig(held_out_share=0.5, evaluation_days=1)})
    users = pa.array(range(100))
    one, two, _idle, *_ = users.filter(pa.array(is_held_out(users, 0.5))).to_pylist()
    taught, *_ = users.filter(pa.array(~is_held_out(users, 0.5))).to_pylist()
    write_pins(site, START, {"a": [1, 0], "b": [0, 1]})
    write_pins(site, SECOND_DAY, {"fresh": [1, 1]})
    past = [(user, "a", second, "look") for second, user in enumerate((one, two, taught))]
    past += [(one, "odd", 9, "look"), (taught, "odd", 10, "look"), (taught, "odd", 11, "look")]
    site.write_log(START, past)
    later = [(one, "fresh", 1), (one, "b", 2), (one, "fresh", 3), (one, "other", 4), (two, "fresh", 5), (two, "odd", 6)]
    later += [(one, "odd", 7)]
    site.write_log(SECOND_DAY, [(user, pin, DAY_S + second, "look") for user, pin, second in later])
    days = [START, SECOND_DAY]
    site.ingest(days)
    site.build(days)
    list(build_pin_features(site.site, days, engine=site.engine, progress=silent))
    build_training_set(site.site, cut_ds=None, engine=site.engine, progress=silent)
    data = open_training_set(latest_training_set(site.site))
    question = open_question(site.site, data, progress=silent)
    assert question.user_ids.to_pylist() == [
        user for user in data.held_out.user_ids().to_pylist() if user in (one, two)
    ]
    first, second = (question.user_ids.to_pylist().index(user) for user in (one, two))
    found = sorted(zip(question.unaskable.user_P.tolist(), question.unaskable.pin_P.tolist(), strict=True))
    assert [user for user, _ in found] == sorted([first] * 3 + [second])  # fresh twice and other; fresh
    assert {pin for user, pin in found if user == second} < {pin for user, pin in found if user == first}
    assert {pin for _, pin in found} == {-1, -2}
    assert (question.counts["positives"], question.counts["unaskable_positives"]) == (3, 4)
    assert question.share_unaskable == (2 + 1) / (4 + 2)
    assert data.has_feature.tolist() == [True, True, False]
    assert question.index_pin.tolist() == [0, 1, 2]  # odd, too
    coverage = vector_coverage(site.site, question)
    assert coverage["share_of_positives"] == (3 + 2) / (4 + 2)  # all but b
    assert coverage["share_of_actions"] == 1 / 3  # a, a and odd
    of_parts = vector_coverage(site.site, question, needs_content=False)  # a model of parts ranks odd, too
    assert of_parts["share_of_positives"] == (2 + 1) / (4 + 2)
    assert of_parts["share_of_actions"] == 0
    scores = score_baseline(question, "popularity_7d", frequencies=("once",), progress=silent).frequencies["once"]
    assert scores.recall_at_10[[first, second]].tolist() == [2 / 4, 1 / 2]  # b and odd; odd
    assert scores.num_unaskable[[first, second]].tolist() == [2, 1]
    assert scores.num_new[[first, second]].tolist() == [4 - 1, 2]  # the first user had seen odd before the cut
    for name in CONTENT_BASELINES:
        content = score_baseline(question, name, frequencies=("once",), progress=silent).frequencies["once"]
        assert content.recall_at_10[[first, second]].tolist() == [1 / 4, 0]  # odd is neither found nor a result
        assert sorted(content.top_10[0].tolist()) == [-1] * 8 + [0, 1]


@pytest.mark.parametrize(
    ("pins", "needs_content", "remedy"),
    [
        ({"vectors": {"npy": "v.npy", "ids": "i.npy"}}, True, "source.pins.vectors: v.npy and i.npy have no row"),
        ({"vectors": {"npy": "v.npy", "ids": "i.npy"}}, False, "source.pins.catalogue: a catalogue would make pins"),
        (
            {"pin_id": "id", "catalogue": {"path": "p.csv"}},
            True,
            "source.pins.catalogue: p.csv has no row for these pins",
        ),
        ({}, True, "source.pins.catalogue: a catalogue would make pins known before their first action"),
    ],
)
def test_the_remedy_names_the_key(
    site: Site, data: TrainingSet, pins: dict[str, object], needs_content: bool, remedy: str
) -> None:
    question = open_question(site, data, progress=silent)
    source = site.source.model_copy(update={"pins": PinsSource.model_validate(pins)})
    site = site.model_copy(update={"source": source})
    assert vector_coverage(site, question, needs_content=needs_content)["remedy"].startswith(remedy)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_judged_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def data(site: Site) -> TrainingSet:
    return open_training_set(latest_training_set(site))


def limited(site: Site, **limits: int) -> Site:
    rule = PromotionConfig(**limits)
    return site.model_copy(update={"serving": site.serving.model_copy(update={"promotion": rule})})


def test_a_question_is_the_same_whenever_it_is_opened(site: Site, data: TrainingSet) -> None:
    one, other = (open_question(site, data, progress=silent) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert (one.num_users, one.num_pins, one.last_ds) == (data.held_out.num_users, NUM_PINS, LAST)
    fewer = open_question(limited(site, num_users=7), data, progress=silent)
    assert fewer.num_users == 7
    assert set(fewer.user_ids.to_pylist()) < set(one.user_ids.to_pylist())
    assert fewer.fingerprint != one.fingerprint
    timelines = fewer.timelines
    for user in range(7):
        ts = timelines.ts[timelines.offsets[user] : timelines.offsets[user + 1]]
        assert len(ts) == 3 * 3
        assert (np.diff(ts) >= 0).all()


def test_the_whole_past_is_held(site: Site, data: TrainingSet) -> None:
    """A pin that a user has seen long ago is not new."""
    question = open_question(site, data, progress=silent)
    rows = pc.index_in(question.user_ids, data.held_out.user_ids()).to_pylist()
    for user, row in enumerate(rows):
        ts = question.timelines.ts[question.timelines.offsets[user] : question.timelines.offsets[user + 1]]
        past = data.held_out.ts[data.held_out.offsets[row] : data.held_out.offsets[row + 1]]
        assert ts[ts < data.cut_us].tolist() == past.tolist()


def test_new_pins_are_those_without_an_action_before_the_cut(site: Site, data: TrainingSet) -> None:
    question = open_question(site, data, progress=silent)
    queries, timelines = ask(question, "once"), question.timelines
    for row, is_new in zip(queries.positive_A, queries.is_new_P, strict=True):
        user = np.searchsorted(timelines.offsets, row, side="right") - 1
        actions = range(timelines.offsets[user], timelines.offsets[user + 1])
        known = {timelines.pin[action] for action in actions if timelines.ts[action] < data.cut_us}
        assert is_new == (timelines.pin[row] not in known)
    assert 0 < queries.is_new_P.sum() < len(queries.is_new_P)
    query, pin = question.seen_pins(queries.user_Q, queries.end_Q)
    assert len(set(zip(query.tolist(), pin.tolist(), strict=True))) == len(pin)


def test_at_most_two_weeks_judge(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "ingested_days", lambda _: ds_range(START, shift_ds(START, 30)))
    assert evaluation._last_day(site, shift_ds(START, 10)) == shift_ds(START, 24)
    assert evaluation._last_day(site, shift_ds(START, 20)) == shift_ds(START, 30)


@pytest.mark.parametrize("days", [[], [START, CUT]])
def test_without_days_after_the_cut(
    site: Site, data: TrainingSet, days: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "ingested_days", lambda _: days)
    with pytest.raises(PipelineError, match=f"ends with {CUT}, and raw_actions has no day after it") as error:
        open_question(site, data, progress=silent)
    assert "--select training_set,pinnerformer_model" in str(error.value)


def test_nobody_to_judge_by_is_said(site: Site, data: TrainingSet, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.zeros(0, np.int64), {}
    monkeypatch.setattr(evaluation, "_users_with_positives", lambda *_: nothing)
    with pytest.raises(PipelineError, match=f"no held-out user has a positive action after {CUT}"):
        open_question(site, data, progress=silent)


# A drawn question

# Two users; a positive is in capitals. Days count from the cut: the embedding for day 0 knows what was until -1.
FIRST = [
    (-3.0, 10, "click"),
    (-0.5, 11, "click"),  # after -1 d: unknown to the daily embedding of day 0
    (0.5, 20, "REPIN"),  # day 0
    (0.6, 20, "CLICK"),  # day 0, the same pin
    (1.0, 21, "REPIN"),  # the first moment of day 1
    (3.25, 20, "REPIN"),  # day 3
    (3.5, 22, "closeup"),
]
SECOND = [(-0.25, 12, "click"), (0.75, 30, "REPIN"), (2.5, 31, "REPIN")]


@pytest.fixture
def planted(tmp_path: Path) -> TrainingSet:
    return open_training_set(write_planted_set(tmp_path / "set"))


def asked(planted: TrainingSet, frequency: Frequency) -> Queries:
    return ask(draw_question(planted, [FIRST, SECOND], index_pin=np.arange(50)), frequency)


def as_pairs(queries: Queries) -> list[tuple[int, int]]:
    """Return (the first action that the embedding does not read, the positive that it searches for)."""
    return list(zip(queries.end_Q[queries.query_P].tolist(), queries.positive_A.tolist(), strict=True))


def test_once_knows_everything_until_the_cut(planted: TrainingSet) -> None:
    queries = asked(planted, "once")
    assert queries.user_Q.tolist() == [0, 1]
    assert as_pairs(queries) == [(2, 2), (2, 3), (2, 4), (2, 5), (8, 8), (8, 9)]
    assert queries.is_counted_P.tolist() == [True, False, True, False, True, True]  # pin 20 is one pin
    assert queries.is_counted_by_type_P.tolist() == [True, True, True, False, True, True]
    assert queries.shown_U.tolist() == [0, 1]


def test_daily_lags_a_day_behind(planted: TrainingSet) -> None:
    queries = asked(planted, "daily")
    assert as_pairs(queries) == [
        *((1, 2), (1, 3)),  # day 0: what was until -1 d
        (2, 4),  # day 1: what was until the cut
        (5, 5),  # day 3: what was until 2 d, 1.0 included
        (7, 8),  # day 0 of the second user: nothing was known of her yet
        (9, 9),  # day 2: what was until 1 d
    ]
    assert queries.is_counted_P.tolist() == [True, False, True, True, True, True]


def test_realtime_knows_all_that_came_before(planted: TrainingSet) -> None:
    queries = asked(planted, "realtime")
    assert as_pairs(queries) == [(action, action) for action in (2, 3, 4, 5, 8, 9)]
    assert queries.is_counted_P.all()


def test_of_many_positives_some_are_asked_for_in_real_time(
    planted: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequencies, "REALTIME_POSITIVES", 3)
    queries = asked(planted, "realtime")
    assert len(queries.positive_A) == 3 + 2
    assert set(queries.positive_A.tolist()) < {2, 3, 4, 5, 8, 9}
    assert (queries.end_Q[queries.query_P] == queries.positive_A).all()
    assert queries.user_Q[queries.query_P].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("frequency", ["once", "daily", "realtime"])
def test_one_embedding_of_each_user_is_shown(planted: TrainingSet, frequency: Frequency) -> None:
    queries = asked(planted, frequency)
    assert queries.user_Q[queries.shown_U].tolist() == [0, 1]
    assert (np.diff(queries.query_P) >= 0).all()
    assert (np.diff(queries.user_Q) >= 0).all()
