"""Training rows: what they read, who trains, and that a step is a function of its number."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pf_core.config.training import TrainConfig, auto, change_auto
from pf_core.days import DAY_US
from pf_core.timelines.arrays import Timelines
from pf_core.training.parts import rows as rows_module
from pf_core.training.parts.counts import UseLog
from pf_core.training.parts.prepared import Prepared, open_prepared, prepare
from pf_core.training.parts.rows import MIN_ROWS, DayRows, RowSampler, Targets, first_at, is_validation
from pf_core.training.parts.steps import open_steps
from pf_core.training.parts.task import PartsStep
from pf_core.training.training_set import open_training_set
from tests.support.parts import FIRST_DAY, Action, random_model, random_timelines, timelines_of, write_parts_set

NUM_PINS, NUM_DAYS = 12, 24


def config_of(*, steps: int = 4, batch_users: int = 32, **parts: Any) -> TrainConfig:
    small = {"factor_dim": 4, "trend_dim": 2, "window_days": 5, "min_window_days": 2, "points_in_time": 3}
    return change_auto(auto(), {"parts": small | parts, "batch_users": batch_users, "optimizer": {"num_steps": steps}})


def sampler_of(
    folder: Path, timelines: Timelines, config: TrainConfig, *, num_pins: int = NUM_PINS, content_dim: int = 0
) -> RowSampler:
    path = write_parts_set(folder / "set", timelines, num_pins=num_pins, num_days=NUM_DAYS, content_dim=content_dim)
    data = open_training_set(path)
    assert config.parts is not None
    prepare(data, config.parts, folder / "prepared", lambda message: None)
    return RowSampler(data, config, open_prepared(data, folder / "prepared"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sampler(tmp_path: Path) -> Callable[..., RowSampler]:
    """A sampler of 80 random users; the arguments are settings."""

    def make(*, content_dim: int = 0, num_pins: int = NUM_PINS, **config: Any) -> RowSampler:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        timelines = random_timelines([20] * 80, num_pins=num_pins, num_days=NUM_DAYS)
        return sampler_of(folder, timelines, config_of(**config), num_pins=num_pins, content_dim=content_dim)

    return make


def tensors(rows: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested named tuples, by name."""
    if isinstance(rows, Tensor):
        yield name, rows
    elif isinstance(rows, tuple):
        for field, value in rows._asdict().items():  # type: ignore[attr-defined]
            yield from tensors(value, f"{name}.{field}")


def assert_equal(one: Any, other: Any) -> None:
    """Bit for bit."""
    first, second = dict(tensors(one)), dict(tensors(other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert tensor.shape == second[name].shape, name
        assert tensor.numpy().tobytes() == second[name].numpy().tobytes(), name


# Nothing of a row's day or later enters its inputs

INPUTS = ("own", "own_inputs", "newest", "keep_P", "own_place_P", "pool_inputs", "rates_MW", "mean_rate_W")
"""What a row reads. Targets, their weights and the correction of the sampled softmax are of the day or later."""


def inputs_of(
    users: list[list[Action]], day: int, config: TrainConfig, target_pins: list[int] | None = None
) -> dict[str, Any]:
    """The inputs of all users with a past on a day, given that all pins are in the pool."""
    with tempfile.TemporaryDirectory() as folder:
        sampler = sampler_of(Path(folder), timelines_of(*users), config, content_dim=3)
        train = sampler.data.train
        start_R = train.offsets[:-1].copy()
        end_R = first_at(train, start_R, train.offsets[1:], day)
        user_R = np.flatnonzero(end_R > start_R)
        pin_T = np.arange(len(user_R)) % NUM_PINS if target_pins is None else np.resize(target_pins, len(user_R))
        targets = Targets(user_R, start_R[user_R], end_R[user_R], np.arange(len(user_R)), pin_T)
        pool = sampler._pool(day, np.arange(NUM_PINS), np.zeros(NUM_PINS))
        rows = sampler.rows(day, targets, pool, key=5)
        read = {name: getattr(rows, name) for name in INPUTS}
        return {name: [(at, tensor.clone()) for at, tensor in tensors(each)] for name, each in read.items()}


ACTIONS = st.lists(
    st.tuples(st.integers(0, NUM_DAYS * 24 - 1), st.integers(0, NUM_PINS - 1), st.integers(0, 2), st.booleans()),
    max_size=10,
)
USERS = st.lists(ACTIONS, min_size=5, max_size=5)


def cut(users: list[list[tuple[int, int, int, bool]]], day: int, *, is_past: bool) -> list[list[Action]]:
    """The actions before a day, or those of the day and later; times are in hours of the log."""
    return [
        [
            (FIRST_DAY + hour / 24, pin, kind, positive)
            for hour, pin, kind, positive in sorted(user)
            if (FIRST_DAY + hour // 24 < day) == is_past
        ]
        for user in users
    ]


def find_leak() -> None:
    """Alter everything from a day on, in all ways that Hypothesis finds; raise if a row's inputs change."""

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        log=USERS,
        other=USERS,
        day=st.integers(FIRST_DAY + 6, FIRST_DAY + NUM_DAYS - 2),
        max_pairs=st.sampled_from([15, 10**6]),
        target_pins=st.lists(st.integers(0, NUM_PINS - 1), min_size=1, max_size=5),
    )
    def check(
        log: list[list[tuple[int, int, int, bool]]],
        other: list[list[tuple[int, int, int, bool]]],
        day: int,
        max_pairs: int,
        target_pins: list[int],
    ) -> None:
        settings_of_row = {"max_factor_pairs": max_pairs, "transformer_layers": 1, "sequence_length": 4}
        config = config_of(**settings_of_row)
        past, future = cut(log, day, is_past=True), cut(other, day, is_past=False)
        # The first user has a past, so that there is a row to compare.
        past[0] = [(FIRST_DAY + 0.5, 1, 0, True), *[action for action in past[0] if action[0] > FIRST_DAY + 0.5]]
        whole = [before + after for before, after in zip(past, cut(log, day, is_past=False), strict=True)]
        altered = [before + after for before, after in zip(past, future, strict=True)]
        expected = inputs_of(whole, day, config)
        for changed in (inputs_of(altered, day, config, target_pins), inputs_of(past, day, config)):
            for name in INPUTS:
                assert [at for at, _ in expected[name]] == [at for at, _ in changed[name]]
                for (at, one), (_, two) in zip(expected[name], changed[name], strict=True):
                    assert one.shape == two.shape, name + at
                    assert one.numpy().tobytes() == two.numpy().tobytes(), name + at

    check()


def test_nothing_of_the_day_or_later_enters_a_rows_inputs() -> None:
    find_leak()


LEAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "counts of the day itself": lambda patch: _patch_result(patch, UseLog, "before", lambda self, day: (self, day + 1)),
    "factors of all days": lambda patch: _patch_result(
        patch, Prepared, "point_before", lambda self, day: (self, 10**6)
    ),
    "own actions of the day": lambda patch: _patch_result(
        patch,
        rows_module,
        "own_pins",
        lambda timelines, start, end: (timelines, start, np.minimum(end + 1, len(timelines.ts))),
    ),
}


def _patch_result(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> None:
    """Replace a function by itself with changed arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments: original(*change(*arguments)))


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(monkeypatch: pytest.MonkeyPatch, leak: str) -> None:
    LEAKS[leak](monkeypatch)
    with pytest.raises(AssertionError):
        find_leak()


# Who trains, and when


def test_rows_have_a_past_and_targets_after_their_day(sampler: Callable[..., RowSampler]) -> None:
    found = sampler(content_dim=3)
    day = FIRST_DAY + 12
    targets = found.targets(np.arange(80), day)
    train = found.data.train
    expected = set()
    for user in range(80):
        mine = slice(*train.offsets[user : user + 2].tolist())
        day_A, pin_A, is_positive_A = train.ts[mine] // DAY_US, train.pin[mine], train.is_positive[mine]
        if (day_A < day).any():
            inside = is_positive_A & (day_A >= day) & (day_A < day + 5)
            expected |= {(user, int(pin)) for pin in pin_A[inside]}
        place = np.flatnonzero(targets.user_R == user)
        if len(place):
            assert targets.end_R[place[0]] - targets.start_R[place[0]] == (day_A < day).sum()
    assert set(zip(targets.user_R[targets.row_T].tolist(), targets.pin_T.tolist(), strict=True)) == expected
    assert len(targets.pin_T) == len(expected)


def test_without_memory_own_pins_are_no_targets(sampler: Callable[..., RowSampler]) -> None:
    with_memory, without = sampler(), sampler(memory=False)
    day = FIRST_DAY + 12
    everything, new = (each.targets(np.arange(80), day) for each in (with_memory, without))
    train = with_memory.data.train
    past = {
        user: set(train.pin[start:end].tolist())
        for user, start, end in zip(everything.user_R.tolist(), everything.start_R, everything.end_R, strict=True)
    }
    pairs = set(zip(everything.user_R[everything.row_T].tolist(), everything.pin_T.tolist(), strict=True))
    expected = {(user, pin) for user, pin in pairs if pin not in past[user]}
    assert set(zip(new.user_R[new.row_T].tolist(), new.pin_T.tolist(), strict=True)) == expected
    assert 0 < len(expected) < len(pairs)


def test_validation_users_never_train(sampler: Callable[..., RowSampler], monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampler(validation_share=0.4)
    users = np.arange(80)
    is_theirs = is_validation(users, 0.4)
    assert 10 < is_theirs.sum() < 70
    drawn: list[np.ndarray] = []
    original = RowSampler.rows

    def spy(self: RowSampler, day: int, targets: Targets, pool: Any, *, key: int | None) -> DayRows:
        drawn.append(targets.user_R)
        return original(self, day, targets, pool, key=key)

    monkeypatch.setattr(RowSampler, "rows", spy)
    for step in range(20):
        found.plan(step)
    assert set(np.concatenate(drawn).tolist()) == set(users[~is_theirs].tolist())
    drawn.clear()
    assert found.validation_rows() is not None
    assert set(np.concatenate(drawn).tolist()) <= set(users[is_theirs].tolist())


@pytest.mark.parametrize(("num_users", "share"), [(6, 0.9), (12, 0.1)])
def test_on_a_log_of_few_users_all_train(tmp_path: Path, num_users: int, share: float) -> None:
    """All six would be validation users, or one of twelve, which is too few to choose a step."""
    num_theirs = int(is_validation(np.arange(num_users), share).sum())
    assert num_theirs == 6 if num_users == 6 else 0 < num_theirs < MIN_ROWS
    timelines = random_timelines([30] * num_users, num_pins=NUM_PINS, num_days=NUM_DAYS)
    found = sampler_of(tmp_path, timelines, config_of(validation_share=share, batch_users=100))
    assert found.validation_rows() is None
    assert max(rows.num_rows for step in range(4) for rows in found.plan(step)) == num_users


def test_the_last_days_have_a_window(sampler: Callable[..., RowSampler]) -> None:
    found = sampler()
    assert found.days.end_day == FIRST_DAY + NUM_DAYS
    assert found.days.day[-1] == found.days.end_day - 2  # min_window_days
    assert found.days.day[0] > FIRST_DAY
    assert found.days.share.sum() == pytest.approx(1)
    assert (np.diff(found.days.share) > 0).all()
    rows = found.validation_rows()
    assert rows is not None
    assert rows[1] == found.days.end_day - 5


def test_every_row_reads_a_fit_that_ends_before_its_day(sampler: Callable[..., RowSampler]) -> None:
    found = sampler()
    points = [point.day for point in found.prepared.points]
    assert points == sorted(set(points))
    assert points[-1] == found.days.end_day
    assert points[0] == found.days.day[0]
    for day in found.days.day.tolist():
        point = found.prepared.point_before(day)
        assert point.day <= day
        assert not any(point.day < other <= day for other in points)


# A step is a function of its number


def test_a_step_is_a_pure_function_of_its_number(sampler: Callable[..., RowSampler]) -> None:
    one, other = sampler(content_dim=3), sampler(content_dim=3)
    forward = [one.plan(step) for step in range(4)]
    backward = [other.plan(step) for step in (3, 2, 1, 0)][::-1]
    for first, second in zip(forward, backward, strict=True):
        assert len(first) == len(second) > 0
        for rows, again in zip(first, second, strict=True):
            assert_equal(rows, again)
    assert any(
        len(first) != len(second) or first[0].own.pin_P.tolist() != second[0].own.pin_P.tolist()
        for first, second in itertools.pairwise(forward)
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_processes_give_the_steps_that_none_gives(sampler: Callable[..., RowSampler], num_workers: int) -> None:
    found = sampler(content_dim=3)
    folder = found.data.path.parent / "prepared"
    steps = open_steps(
        found.data.path, found.config, folder, first_step=1, rank=1, world_size=2, num_workers=num_workers
    )
    mine = RowSampler(found.data, found.config, found.prepared, 1, 2)
    for step in (1, 2, 3):
        given_step, expected = next(steps), mine.plan(step)
        assert len(given_step) == len(expected) > 0
        for rows, again in zip(given_step, expected, strict=True):
            assert_equal(rows, again)
            assert rows.num_rows == again.num_rows
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("world_size", [2, 10])
@pytest.mark.parametrize("parts", [{}, {"memory": False}, {"full_softmax_pins": 1, "num_negatives": 5}])
def test_ranks_share_the_loss_and_the_gradient_of_one(
    sampler: Callable[..., RowSampler], world_size: int, parts: dict[str, Any]
) -> None:
    """A day of the step has 8 rows: of 10 ranks, two have none."""
    whole = sampler(content_dim=3, **parts)
    assert whole.config.parts is not None

    def run(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = random_model(content_dim=3, **whole.config.parts.model_dump() if whole.config.parts else {})
        module = PartsStep(model, world_size=size)
        loss = module(RowSampler(whole.data, whole.config, whole.prepared, rank, size).plan(2))
        loss.backward()
        gradients = {}
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name  # DistributedDataParallel waits for every gradient
            gradients[name] = weight.grad
        return loss.detach(), gradients

    loss, gradients = run(0, 1)
    shares = [run(rank, world_size) for rank in range(world_size)]
    torch.testing.assert_close(torch.stack([each for each, _ in shares]).mean(), loss, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        mean = torch.stack([each[name] for _, each in shares]).mean(0)
        torch.testing.assert_close(mean, gradient, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)
    assert sum(float(gradient.abs().max()) > 0 for gradient in gradients.values()) > 0.8 * len(gradients)


# The sampled softmax


@pytest.mark.parametrize("content_dim", [0, 3])
def test_a_sample_of_everything_is_the_full_softmax(sampler: Callable[..., RowSampler], content_dim: int) -> None:
    full = sampler(content_dim=content_dim, days_per_step=1)
    sampled = sampler(content_dim=content_dim, days_per_step=1, full_softmax_pins=1, num_negatives=20_000)
    model = random_model(content_dim=content_dim, factor_dim=4, trend_dim=2)
    module = PartsStep(model, world_size=1)
    for step in range(2):
        one, other = full.plan(step), sampled.plan(step)
        assert [len(rows.correction_M) for rows in one] == [len(rows.correction_M) for rows in other]
        assert all(rows.correction_M.abs().max() < 1e-6 for rows in other)
        torch.testing.assert_close(module(one), module(other))


def test_the_sampled_softmax_estimates_the_full_one(sampler: Callable[..., RowSampler]) -> None:
    """The sum over a corrected sample has the mean of the whole sum; here over 60 pins by 12 draws, 600 times."""
    full = sampler(num_pins=60)
    sampled = sampler(num_pins=60, full_softmax_pins=1, num_negatives=12)
    day = FIRST_DAY + 15
    rng = np.random.default_rng(0)
    nothing = np.zeros(0, np.int64)
    value_N = np.exp(rng.normal(size=60))
    competes = np.flatnonzero(sampled.competing(day))
    estimates = []
    for _ in range(600):
        pool = sampled.pool(day, nothing, rng)
        assert np.isin(pool.pin_M, competes).all()
        estimates.append(float((value_N[pool.pin_M] * pool.correction_M.double().exp().numpy()).sum()))
    assert np.array_equal(full.pool(day, nothing, rng).pin_M, competes)
    assert np.mean(estimates) == pytest.approx(value_N[competes].sum(), rel=0.05)
