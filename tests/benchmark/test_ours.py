"""Our rows of the benchmark: the product's stages on a log, training within a budget, and exact lists."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from pf_core.benchmark import budget
from pf_core.benchmark.baselines import popular_list
from pf_core.benchmark.budget import (
    MEASURED_SHARE,
    MEASURED_STEPS,
    MEASURED_USERS,
    MIN_STEPS,
    SAFETY,
    fit_to_budget,
    seconds_per_step,
    with_steps,
)
from pf_core.benchmark.log import LIST_LENGTH, BenchmarkLog, RankedLists
from pf_core.benchmark.ours import (
    OurResult,
    actions_without_vector,
    content_vectors,
    our_lists,
    positives_without_vector,
)
from pf_core.benchmark.ranking import rank_vectors
from pf_core.benchmark.reading import read_log
from pf_core.benchmark.stages import benchmark_site, build_pins, cut_of_log, ingest_log, prepare_training_set
from pf_core.config.site import Site
from pf_core.config.training import TrainConfig, auto, demo, paper
from pf_core.embeddings.inference import cut_sequences, embed, encode_timelines
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.evaluation.embedders import open_model_embedder
from pf_core.evaluation.question import Question
from pf_core.hashing import is_held_out
from pf_core.logs.partition import bucket_files
from pf_core.metrics.exact_search import Pairs
from pf_core.model.checkpoint import load_model
from pf_core.model.device import single_threaded
from pf_core.pins.features import pin_state, read_pin_features
from pf_core.pins.packed import open_pins, pack_pins
from pf_core.storage.arrays import read_arrow
from pf_core.timelines.build import read_bucket, timeline_state
from pf_core.training.parts import prepared
from pf_core.training.parts.factors import Factors, fit_factors
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.benchmark_logs import make_log
from tests.support.shop import (
    CUT_DS,
    DAYS,
    HELD_OUT_SHARE,
    NUM_PINS,
    NUM_USERS,
    Row,
    shop_actions,
    without_vectors,
    write_shop,
)

IDS = pa.array(range(NUM_USERS))
HELD_OUT = IDS.filter(pa.array(is_held_out(IDS, HELD_OUT_SHARE))).to_pylist()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with single_threaded():  # two threads wait for each other longer than a tiny model computes
        yield


def silent(message: str) -> None:
    pass


def engine_in(folder: Path) -> LocalEngine:
    return LocalEngine(num_workers=1, memory_mb=64, temp_dir=folder / "tmp")


def run_stages(site: Site, folder: Path) -> Site:
    site = benchmark_site(site, folder / "cache")
    engine = engine_in(folder)
    ingest_log(site, engine=engine, progress=silent)
    build_pins(site, CUT_DS, engine=engine, progress=silent)
    return site


def run_ours(folder: Path, rows: list[Row], **changes: Any) -> tuple[Site, BenchmarkLog, OurResult]:
    site = run_stages(write_shop(folder, rows, **changes), folder)
    log = read_log(site, name="shop", cut_ds=CUT_DS, num_days=3, progress=silent)
    result = our_lists(
        site,
        log,
        preset=None,
        seed=0,
        max_steps=None,
        budget_s=600,
        engine=engine_in(folder),
        folder=folder / "model",
        progress=silent,
    )
    return site, log, result


RARE: list[Row] = [
    (HELD_OUT[0], "rare", DAYS[2], 7200 * 5),  # one user: no vector
    (HELD_OUT[0], "rare", DAYS[10], 7200 * 5),
    (HELD_OUT[1], "new", DAYS[11], 7200 * 5),  # not in the index
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, BenchmarkLog, OurResult, Path]:
    folder = tmp_path_factory.mktemp("ours")
    return *run_ours(folder, [*shop_actions(), *RARE]), folder


def list_of(lists: RankedLists, user: int) -> tuple[list[int], np.ndarray]:
    theirs = slice(lists.offsets_U[user], lists.offsets_U[user + 1])
    return lists.pin[theirs].tolist(), lists.score[theirs]


def test_lists_are_those_of_the_vectors_that_serving_stores(
    made: tuple[Site, BenchmarkLog, OurResult, Path],
) -> None:
    site, log, result, folder = made
    (path,) = (folder / "model").glob("*/model")
    model, description = load_model(path)
    pins = open_pins(pack_pins(site, pin_state(site).require(CUT_DS), silent))
    tables = [read_bucket(timeline_state(site), CUT_DS, bucket) for bucket in range(2)]
    served = {}
    for table in tables:
        sequences = cut_sequences(encode_timelines(table, pins, description), description["model"]["sequence_length"])
        vectors, _ = embed(model, sequences, np.arange(len(sequences.user_ids)), pins, num_threads=1)
        served |= dict(zip(sequences.user_ids.to_pylist(), vectors, strict=True))
    features = read_pin_features(site, CUT_DS, ["pin_id", "feature"]).sort_by("pin_id").to_pylist()
    features = [pin for pin in features if pin["feature"] is not None]
    with torch.no_grad():
        pin_ND = model.embed_pins(torch.tensor([pin["feature"] for pin in features])).numpy()
    row_N = np.array([log.pin_ids.to_pylist().index(pin["pin_id"]) for pin in features])
    assert len(log.test_user_ids) == len(result.lists.offsets_U) - 1 > 5
    for number, user in enumerate(log.test_user_ids.to_pylist()):
        listed, score = list_of(result.lists, number)
        expected = pin_ND @ served[user]
        assert len(listed) == len(row_N)  # fewer pins than LIST_LENGTH
        np.testing.assert_allclose(score, np.sort(expected)[::-1], atol=1e-5)
        np.testing.assert_allclose(score, expected[[row_N.tolist().index(pin) for pin in listed]], atol=1e-5)
        assert (np.diff(score) <= 0).all()


def test_what_has_no_vector_is_counted(made: tuple[Site, BenchmarkLog, OurResult, Path]) -> None:
    site, log, result, _ = made
    num_positives = len(log.positive_pin_P) + 1
    assert log.num_unaskable_U.sum() == 1
    assert result.share_of_positives_without_vector == pytest.approx(2 / num_positives)
    assert result.share_of_actions_without_vector == pytest.approx(1 / len(log.past.pin))
    vectors = content_vectors(site, log)
    rare = log.pin_ids.to_pylist().index("rare")
    has_vector = ~np.isnan(vectors).any(axis=1)
    assert np.flatnonzero(~has_vector).tolist() == [rare]
    assert vectors.shape == (NUM_PINS + 1, 4)
    data = open_training_set(latest_training_set(site))
    assert vectors[has_vector].tobytes() == data.pin_feature[data.has_feature].tobytes()
    assert result.num_unranked_pins == 1
    nobody = replace(log, positive_user_P=log.positive_user_P[:0], positive_pin_P=log.positive_pin_P[:0])
    assert positives_without_vector(nobody, has_vector) == 1.0
    assert actions_without_vector(log, has_vector) == result.share_of_actions_without_vector
    assert result.note == "20 steps"
    assert (result.settings["preset"], result.settings["num_layers"], result.settings["num_steps"]) == ("tiny", 1, 20)


@pytest.mark.parametrize("has_vectors", [True, False])
def test_a_user_without_an_action_gets_the_popular_list(tmp_path: Path, has_vectors: bool) -> None:
    lonely = next(user for user in HELD_OUT if user > 2)
    rows = [row for row in shop_actions() if row[0] != lonely]
    rows += [(lonely, "p01", DAYS[10], 0)]
    _, log, result = run_ours(tmp_path, rows, **({} if has_vectors else without_vectors(tmp_path)))
    number = log.test_user_ids.to_pylist().index(lonely)
    user_days = Counter(
        pin for _, pin, _ in {row[:3] for row in rows if row[0] not in HELD_OUT and DAYS[1] < row[2] <= CUT_DS}
    )
    popular = sorted(user_days.items(), key=lambda each: (-each[1], each[0]))
    assert len(popular) == NUM_PINS < LIST_LENGTH
    for lists in (result.lists, result.vector_lists):
        listed, score = list_of(lists, number)
        assert [log.pin_ids[pin].as_py() for pin in listed] == [pin for pin, _ in popular]
        assert score.tolist() == [num for _, num in popular]
        assert (np.diff(lists.offsets_U) > 0).all()
    assert result.note.endswith(", 1 test users without an embedding get the popular list")


def test_a_popular_list_ends_where_pins_have_no_use() -> None:
    train = [(0, 3, -1, True), (0, 3, -1, True), (0, 3, -7, True), (1, 2, -2, True), (1, 1, -3, True)]
    train += [(1, 0, -8, True), (0, 0, -1, False)]  # before the week, and not positive
    log = make_log(num_pins=5, train=train, past=[], positives=[(0, 4)], num_unaskable=[0])
    pin, user_days = popular_list(log)
    assert (pin.tolist(), user_days.tolist()) == ([3, 1, 2], [2, 1, 1])


# Memory


def test_increments_are_added_to_the_cosine() -> None:
    """Two users with vectors and one without; the pins of the index are rows 5, 6, 7, 8 of the log."""
    index_ND = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-1.0, 0.0]])
    vector_VD = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    increments = Pairs(torch.tensor([0, 0, 1]), torch.tensor([3, 0, 1]), torch.tensor([1.5, -2.0, 0.6]))
    arguments = (vector_VD, index_ND, np.array([5, 6, 7, 8]), np.array([True, False, True]), np.array([4, 2, 3]))
    popular = np.array([7, 5, 6]), np.array([9, 4, 1])
    lists = rank_vectors(*arguments, popular=popular, increments=increments)
    assert lists.offsets_U.tolist() == [0, 4, 6, 9]
    expected = [
        ([6, 8, 7, 5], [0.8, -1 + 1.5, 0.0, 1 - 2.0]),  # never again: last
        ([7, 5], [9, 4]),
        ([6, 7, 5], [0.6 + 0.6, 1.0, 0.0]),
    ]
    alone = rank_vectors(*arguments, popular=popular)
    by_vector = [([5, 6, 7, 8], [1.0, 0.8, 0.0, -1.0]), ([7, 5], [9, 4]), ([7, 6, 5], [1.0, 0.6, 0.0])]
    for found, wanted in ((lists, expected), (alone, by_vector)):
        for user, (pins, scores) in enumerate(wanted):
            listed, score = list_of(found, user)
            assert listed == pins
            np.testing.assert_allclose(score, scores, atol=1e-6)


def test_increments_stay_with_their_user_when_lists_are_searched_by_length() -> None:
    rng = np.random.default_rng(0)
    vector_VD, index_ND = (torch.nn.functional.normalize(torch.randn(num, 8), dim=1) for num in (1500, 60))
    query = np.repeat(np.arange(1500), 3)
    row = np.concatenate([rng.choice(60, 3, replace=False) for _ in range(1500)])
    value = rng.choice([-2.0, 0.5, 1.5], len(row)).astype(np.float32)
    increments = Pairs(*(torch.from_numpy(each) for each in (query, row, value)))
    wanted_U = rng.integers(1, 60, 1500)
    popular = np.zeros(0, np.int64), np.zeros(0, np.int64)
    lists = rank_vectors(
        vector_VD, index_ND, np.arange(60), np.ones(1500, bool), wanted_U, popular=popular, increments=increments
    )
    score_VN = (vector_VD @ index_ND.T).numpy()
    score_VN[query, row] += value
    for user in range(0, 1500, 7):
        listed, score = list_of(lists, user)
        assert listed == np.argsort(-score_VN[user])[: wanted_U[user]].tolist()
        np.testing.assert_allclose(score, score_VN[user, listed], atol=1e-6)


@pytest.mark.parametrize("memory", [True, False])
def test_a_model_of_parts_is_ranked_with_its_memory(tmp_path: Path, memory: bool) -> None:
    """As served and the vector alone differ by the increments, and by nothing else; every pin is ranked."""
    changes = without_vectors(tmp_path)
    changes["training"]["changes"] |= {"parts": {"memory": memory}}
    site, log, result = run_ours(tmp_path, [*shop_actions(), *RARE], **changes)
    assert (result.num_unranked_pins, result.share_of_actions_without_vector) == (0, 0.0)
    assert result.settings["memory"] is memory
    assert result.has_memory
    assert result.settings["num_steps"] == 20
    assert re.fullmatch(r"20 steps, step (5|10|15|20) is the best for the validation users", result.note)
    data = open_training_set(latest_training_set(site))
    users = pc.index_in(log.test_user_ids, value_set=data.held_out.user_ids()).to_numpy()
    question = Question(
        data=data,
        user_ids=log.test_user_ids,
        timelines=data.held_out,
        positive_A=np.zeros(0, np.int64),
        index_pin=np.arange(data.num_pins),
        num_days=3,
        counts={},
    )
    (path,) = (tmp_path / "model").glob("*/model")
    embedders = [open_model_embedder(question, path, name="x", has_memory=has_memory) for has_memory in (True, False)]
    queries = [each.embed(users, data.held_out.offsets[users + 1]) for each in embedders]
    assert queries[1].increments is None
    increments = queries[0].increments
    assert increments is not None
    assert len(increments.pin_I) > 0
    assert (increments.value_I == -2).all() if not memory else (increments.value_I >= 0).all()
    with torch.no_grad():
        pin_ND = embedders[0].pins(np.arange(data.num_pins))
    ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].to_pylist()
    assert ids == log.pin_ids.to_pylist()
    alone_UN = (queries[0].vector_VD @ pin_ND.T).numpy()
    served_UN = alone_UN.copy()
    served_UN[increments.query_I, increments.pin_I] += increments.value_I
    for lists, score_UN in ((result.lists, served_UN), (result.vector_lists, alone_UN)):
        for user in range(len(log.test_user_ids)):
            listed, score = list_of(lists, user)
            np.testing.assert_allclose(score, np.sort(score_UN[user])[::-1][: len(listed)], atol=1e-5)
            np.testing.assert_allclose(score, score_UN[user, listed], atol=1e-5)


@pytest.mark.parametrize("has_vectors", [True, False])
def test_no_action_of_a_test_user_reaches_the_model(tmp_path: Path, has_vectors: bool) -> None:
    """Vocabularies, factors and weights are the same, bit for bit, whatever test users do before or after the cut."""
    rows = shop_actions()
    planted = [(user, f"p{pin:02d}", ds, 60 * pin) for user in HELD_OUT for pin in range(20) for ds in DAYS]
    trained = next(user for user in range(NUM_USERS) if user not in HELD_OUT)
    later = [(user, "p00", DAYS[-1], 60 * user) for user in range(NUM_USERS)]
    found = [(trained, f"p{pin:02d}", DAYS[4], 60 * pin) for pin in range(20)]
    weights = {}
    for name, added in {"plain": [], "planted": [*planted, *later], "found": found}.items():
        changes = {} if has_vectors else without_vectors(tmp_path / name)
        run_ours(tmp_path / name, [*rows, *added], **changes)
        (path,) = (tmp_path / name / "model").glob("*/model/model.safetensors")
        tables = sorted((path.parent / "pin_table").glob("*.npy"))
        assert len(tables) > 0 or has_vectors
        weights[name] = path.read_bytes() + b"".join(table.read_bytes() for table in tables)
    assert weights["planted"] == weights["plain"]
    assert weights["found"] != weights["plain"]  # the same actions of a training user do reach it


def test_lists_are_long_enough_for_both_questions(tmp_path: Path) -> None:
    rows = shop_actions()
    many = [(user, f"q{pin:03d}", DAYS[user % 5], 30 * pin) for user in range(NUM_USERS) for pin in range(0, 120, 2)]
    _, log, result = run_ours(tmp_path, [*rows, *many])
    seen = [len(set(log.past.pin[log.past.user == user].tolist())) for user in range(len(log.test_user_ids))]
    assert np.diff(result.lists.offsets_U).tolist() == [
        min(LIST_LENGTH + num_seen, len(log.pin_ids)) for num_seen in seen
    ]


# Training within a budget


class Clock:
    """Seconds of a step, in proportion to its users above a fixed time; remembers what is measured."""

    def __init__(self, *, fixed_s: float = 1.0, user_s: float = 0.1) -> None:
        self.fixed_s, self.user_s, self.measured = fixed_s, user_s, list[int]()

    def __call__(self, config: TrainConfig) -> float:
        self.measured.append(config.batch_users)
        return self.fixed_s + self.user_s * config.batch_users


def test_a_budget_that_suffices_changes_nothing_but_what_is_measured() -> None:
    config = fit_to_budget(demo(), Clock(fixed_s=0, user_s=1e-6), budget_s=600, num_test_users=10)
    steps = demo().optimizer.num_steps
    assert config == demo().model_copy(update={"evaluate_every": steps, "checkpoint_every": steps})


def test_fewer_steps_with_a_shorter_warm_up() -> None:
    clock = Clock(fixed_s=0.02, user_s=0.01)
    config = fit_to_budget(demo(), clock, budget_s=600, num_test_users=30)
    assert clock.measured == [MEASURED_USERS, 128]
    steps = int((SAFETY * 600 - 30 * 0.01 / 3) / (0.02 + 0.01 * 128))
    assert MIN_STEPS < steps < 1000
    assert (config.optimizer.num_steps, config.batch_users) == (steps, 128)
    assert config.optimizer.warmup_steps == round(100 * steps / 1000)


def test_a_model_of_parts_is_evaluated_as_often_with_fewer_steps() -> None:
    clock = Clock(fixed_s=0.2, user_s=0.01)
    config = fit_to_budget(auto(), clock, budget_s=600, num_test_users=30)
    assert clock.measured == [MEASURED_USERS * 4, 256]  # four days in a step
    steps = int((SAFETY * 600 - 30 * 0.01 / 3) / (0.2 + 0.01 * 256))
    assert MIN_STEPS < steps < 300
    assert (config.optimizer.num_steps, config.batch_users, config.evaluate_every) == (steps, 256, 25)
    assert config.parts == auto().parts
    assert with_steps(auto(), 10).evaluate_every == 10


def test_what_a_measurement_prepares_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []

    def fit(timelines: Any, day: int, **options: Any) -> Factors:
        fitted.append(day)
        return fit_factors(timelines, day, **options)

    monkeypatch.setattr(prepared, "fit_factors", fit)
    run_ours(tmp_path, shop_actions(), **without_vectors(tmp_path))
    assert len(fitted) == len(set(fitted)) > 1
    (run_dir,) = (tmp_path / "model").iterdir()  # neither what was measured nor what was prepared is left
    assert (run_dir / "model" / "model.json").is_file()
    assert not (run_dir / "prepared").exists()


def test_the_time_of_a_step_has_its_share_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 104.0])

    def fake_train(config: TrainConfig, *, observer: Any, run_dir: Path, prepared: Path, **options: Any) -> None:
        prepared.mkdir()
        (run_dir / "model").mkdir(parents=True)
        (run_dir / "history.jsonl").touch()
        for step in range(1, 1 + MEASURED_STEPS + 1):
            observer.measure(step, {"loss": 1.0})
        observer.measure(1 + MEASURED_STEPS, {"recall_at_10": 0.5})

    monkeypatch.setattr(budget, "train", fake_train)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    data = SimpleNamespace(path=tmp_path)
    prepared = tmp_path / "prepared"
    seconds = seconds_per_step(auto(), data, tmp_path / "measured", 0, prepared=prepared)  # type: ignore[arg-type]
    assert seconds == pytest.approx(10 + 24 / 25)
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def test_what_a_training_takes_beyond_its_steps_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = Clock(fixed_s=0.2, user_s=0.01)

    def measure(config: TrainConfig) -> float:
        seconds = clock(config)
        now[0] += 5 + (1 + MEASURED_STEPS) * seconds + (60 if len(clock.measured) == 1 else 0)  # the first one prepares
        return seconds

    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = fit_to_budget(auto(), measure, budget_s=600, num_test_users=0)
    used_s = 2 * 5 + 60 + (1 + MEASURED_STEPS) * ((0.2 + 0.01 * 16) + (0.2 + 0.01 * 256))
    assert config.optimizer.num_steps == int((SAFETY * (600 - used_s) - 5) / (0.2 + 0.01 * 256))


def test_a_limit_of_steps_shortens_the_warm_up_and_depends_on_no_clock() -> None:
    planned = with_steps(demo(), 250)
    assert (planned.optimizer.num_steps, planned.optimizer.warmup_steps) == (250, round(100 * 250 / 1000))
    assert fit_to_budget(planned, Clock(fixed_s=0, user_s=1e-6), budget_s=600, num_test_users=10) == planned
    assert fit_to_budget(planned, Clock(fixed_s=0, user_s=1e-3), budget_s=600, num_test_users=10) == planned


def test_smaller_batches_before_too_few_steps() -> None:
    clock = Clock(fixed_s=0.5, user_s=0.05)
    config = fit_to_budget(paper(), clock, budget_s=212, num_test_users=1)
    affordable = int(MEASURED_SHARE * 212 / ((1 + MEASURED_STEPS) * (0.5 + 4 * 0.05) / 4))
    assert clock.measured == [MEASURED_USERS, affordable]  # a step of 1,024 users takes a quarter of the budget
    left_s = SAFETY * 212 - 0.05 / 3
    assert config.batch_users == int((left_s / MIN_STEPS - 0.5) / 0.05)
    assert config.optimizer.num_steps == int(left_s / (0.5 + 0.05 * config.batch_users))
    assert config.model == paper().model


def test_a_batch_without_anything_to_predict_is_measured_with_more_users() -> None:
    clock = Clock(fixed_s=0.02, user_s=0.01)

    def measure(config: TrainConfig) -> float:
        seconds = clock(config)
        if config.batch_users < 16:
            raise PipelineError("not a single pair")
        return seconds

    config = fit_to_budget(demo(), measure, budget_s=6000, num_test_users=30)
    assert clock.measured == [4, 16, 128]
    assert config.batch_users == 128
    clock.measured.clear()
    with pytest.raises(PipelineError, match="not a single pair"):
        fit_to_budget(demo().model_copy(update={"batch_users": 8}), measure, budget_s=6000, num_test_users=30)
    assert clock.measured == [4, 8]


def test_one_measurement_counts_as_the_users_time() -> None:
    clock = Clock(fixed_s=4.0, user_s=1.0)
    config = fit_to_budget(paper(), clock, budget_s=105, num_test_users=0)
    assert clock.measured == [MEASURED_USERS]
    assert config.batch_users == MEASURED_USERS
    assert config.optimizer.num_steps == int(SAFETY * 105 / (4.0 + 4 * 1.0))


def test_a_budget_for_not_even_a_step() -> None:
    with pytest.raises(PipelineError, match=r"budget of 10 s does not suffice: a step of 4 users takes 20\.0 s"):
        fit_to_budget(paper(), Clock(fixed_s=0, user_s=5.0), budget_s=10, num_test_users=1)
    with pytest.raises(PipelineError, match=r"embedding the 1,000 test users about 1667 s"):
        fit_to_budget(paper(), Clock(fixed_s=0, user_s=5.0), budget_s=600, num_test_users=1000)


# Stages


def test_the_sites_own_data_folder_is_left_alone(made: tuple[Site, BenchmarkLog, OurResult, Path]) -> None:
    site, _, _, folder = made
    assert not (folder / "data").exists()
    assert site.directory.is_relative_to(folder / "cache")


def test_a_changed_log_gets_another_folder(tmp_path: Path) -> None:
    first = benchmark_site(write_shop(tmp_path), tmp_path / "cache")
    assert benchmark_site(write_shop(tmp_path, end_ds=DAYS[-2]), tmp_path / "cache").data_dir != first.data_dir
    longer = benchmark_site(write_shop(tmp_path, [*shop_actions(), (1, "p01", DAYS[0], 0)]), tmp_path / "cache")
    assert longer.data_dir != first.data_dir
    assert benchmark_site(write_shop(tmp_path / "other"), tmp_path / "cache").data_dir != first.data_dir


def test_only_missing_days_are_ingested(tmp_path: Path) -> None:
    site = benchmark_site(write_shop(tmp_path), tmp_path / "cache")
    assert ingest_log(site, engine=engine_in(tmp_path), progress=silent) == DAYS
    stamps = {path: path.stat().st_mtime_ns for path in site.directory.rglob("bucket-*.parquet")}
    num_rows = sum(pq.read_metadata(path).num_rows for ds in DAYS for path in bucket_files(site, ds).values())
    assert num_rows == len(set(shop_actions()))
    assert ingest_log(site, engine=engine_in(tmp_path), progress=silent) == DAYS
    assert {path: path.stat().st_mtime_ns for path in site.directory.rglob("bucket-*.parquet")} == stamps


def test_the_cut_is_a_quarter_of_a_short_log(tmp_path: Path) -> None:
    site = write_shop(tmp_path)
    assert cut_of_log(site, DAYS) == (CUT_DS, 12 // 4, "by default, for a log of 12 days")
    assert cut_of_log(site, DAYS[:2])[:2] == (DAYS[0], 1)
    chosen = site.training.model_validate({**site.training.model_dump(exclude_unset=True), "evaluation_days": 5})
    site = site.model_copy(update={"training": chosen})
    assert cut_of_log(site, DAYS) == (DAYS[6], 5, "training.evaluation_days in the site file")
    with pytest.raises(PipelineError, match=r"has 5 days, and 5 of them are to evaluate"):
        cut_of_log(site, DAYS[:5])
    with pytest.raises(PipelineError, match=r"has 1 days, and 1 of them"):
        cut_of_log(write_shop(tmp_path), DAYS[:1])


def test_pins_and_training_set_of_the_cut_are_built_once(tmp_path: Path) -> None:
    site = benchmark_site(write_shop(tmp_path), tmp_path / "cache")
    ingest_log(site, engine=engine_in(tmp_path), progress=silent)
    build_pins(site, CUT_DS, engine=engine_in(tmp_path), progress=silent)
    assert pin_state(site).days() == [CUT_DS]
    first = prepare_training_set(site, CUT_DS, engine=engine_in(tmp_path), progress=silent)
    assert prepare_training_set(site, CUT_DS, engine=engine_in(tmp_path), progress=silent) == first


def test_a_log_without_a_last_day(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"has no end_ds, and its log has no file for each day.*add `end_ds"):
        benchmark_site(write_shop(tmp_path, end_ds=None), tmp_path / "cache")
