import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pf_core.config.training import TrainConfig, choose
from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.layouts import marked
from pf_core.model.sequences import collate_sequences
from pf_core.training.batches import Batch, BatchPlan, TrainingBatches, open_batches
from pf_core.training.training_set import open_training_set

START_US = 1_767_225_600_000_000
TYPES = ["click", "closeup", "repin"]
FEATURE_DIM = 3

MakeSet = Callable[[Iterable[int]], Path]


@pytest.fixture
def make_set(tmp_path: Path) -> MakeSet:
    """A training set with timelines of the given lengths. Every action has its own pin, whose row is the action's
    number: so a batch can be read back. Pin p's feature is (p, 2p, 3p); every third pin is no candidate; two of three
    actions are positive; a user acts every half day."""

    def make(lengths: Iterable[int]) -> Path:
        offsets = np.cumsum([0, *lengths])
        num = int(offsets[-1])
        number = np.arange(num) - np.repeat(offsets[:-1], np.diff(offsets))
        actions = {
            "offsets": offsets,
            "pin": np.arange(num, dtype=np.int32),
            "ts": START_US + number * DAY_US // 2,
            "action_type": (np.arange(num) % 3).astype(np.int16),
            "surface": (np.arange(num) % 2).astype(np.int16),
            "duration": (np.arange(num) / 8).astype(np.float32),
            "is_positive": np.arange(num) % 3 != 1,
        }
        pins = {
            "feature": np.arange(num, dtype=np.float32)[:, None] * np.arange(1, FEATURE_DIM + 1, dtype=np.float32),
            "has_feature": np.ones(num, bool),
            "candidates": np.flatnonzero(np.arange(num) % 3),
        }
        path = tmp_path / f"set-{len(list(tmp_path.iterdir()))}"
        for folder, arrays in (("train", actions), ("held_out", actions), ("pins", pins)):
            (path / folder).mkdir(parents=True)
            for name, array in arrays.items():
                np.save(path / folder / f"{name}.npy", array)
        manifest = {
            "vocabularies": {"action_type": TYPES, "surface": ["homefeed", "search"]},
            **marked("training_set"),
            "fingerprint": "made-up",
            "time_origin_us": START_US,
            "cut_us": START_US + 365 * DAY_US,
        }
        (path / "training_set.json").write_text(json.dumps(manifest))
        return path

    return make


class Pair(NamedTuple):
    """Actions by their number in the set."""

    start: int
    end: int
    position: int
    target: int
    weight: float


def pairs_of(batch: Batch) -> list[Pair]:
    sequences = batch.sequences
    start_R = sequences.feature_RSF[:, 0, 0].long()
    row_P = batch.query_row_Q[batch.pair_query_P]
    columns = (
        start_R[row_P],
        (start_R + sequences.length_R - 1)[row_P],
        (start_R[batch.query_row_Q] + batch.query_position_Q)[batch.pair_query_P],
        batch.pair_pin_P,
        batch.pair_weight_P,
    )
    return [Pair(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    return [*batch.sequences, *batch[1:-1]]


def assert_equal(one: Batch, other: Batch) -> None:
    for mine, its in zip(tensors_of(one), tensors_of(other), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    assert one.num_users == other.num_users


def tiny(**changes: Any) -> TrainConfig:
    return choose("tiny", changes)


def one_rank(path: Path, config: TrainConfig) -> TrainingBatches:
    return TrainingBatches(path, config, rank=0, world_size=1)


def padding_share(batches: Iterable[Batch]) -> float:
    lengths = [(int(batch.sequences.length_R.sum()), batch.sequences.ts_RS.numel()) for batch in batches]
    return 1 - sum(used for used, _ in lengths) / sum(size for _, size in lengths)


# What a batch holds


@pytest.mark.parametrize("objective", ["next_action", "sasrec", "all_action", "dense_all_action"])
def test_a_batch_reads_back_to_the_timelines(make_set: MakeSet, objective: str) -> None:
    lengths = [2 + user % 23 for user in range(40)]
    path = make_set(lengths)
    config = tiny(sampling={"objective": objective, "window_days": 4, "max_sequences_per_user": 3})
    train = open_training_set(path).train
    user_of = np.repeat(np.arange(40), lengths)
    for step in range(4):
        batch = one_rank(path, config)[step]
        sequences = batch.sequences
        for row, length in enumerate(sequences.length_R.tolist()):
            pins = sequences.feature_RSF[row, :length, 0].long().numpy()
            assert pins.tolist() == list(range(int(pins[0]), int(pins[0]) + length))
            assert len(set(user_of[pins])) == 1
            for column, values in (
                (sequences.feature_RSF, np.outer(pins, [1, 2, 3])),
                (sequences.action_type_RS, train.action_type[pins]),
                (sequences.surface_RS, train.surface[pins]),
                (sequences.duration_RS, train.duration[pins]),
                (sequences.ts_RS, train.ts[pins]),
            ):
                assert column[row, :length].tolist() == values.tolist()
                assert not column[row, length:].any()
        pairs = pairs_of(batch)
        assert {pair.start for pair in pairs} == set(sequences.feature_RSF[:, 0, 0].tolist())
        for pair in pairs:
            assert pair.start <= pair.position <= pair.end < pair.start + config.model.sequence_length
            assert user_of[pair.start] == user_of[pair.target]
            assert train.is_positive[pair.target]
            assert 0 < train.ts[pair.target] - train.ts[pair.position] <= 4 * DAY_US
            assert pair.target > (pair.end if objective in ("next_action", "all_action") else pair.position)
        assert batch.pair_feature_PF.tolist() == np.outer(batch.pair_pin_P, [1, 2, 3]).tolist()
        assert batch.pair_is_candidate_P.tolist() == [pin % 3 != 0 for pin in batch.pair_pin_P.tolist()]
        queries = list(zip(batch.query_row_Q.tolist(), batch.query_position_Q.tolist(), strict=True))
        assert queries == sorted(set(queries))
        assert set(batch.pair_query_P.tolist()) == set(range(len(queries)))
        users = user_of[[pair.start for pair in pairs]]
        assert len(set(zip(users.tolist(), batch.pair_user_P.tolist(), strict=True))) == batch.num_users
        assert set(batch.pair_user_P.tolist()) == set(range(batch.num_users))
        sums = torch.zeros(batch.num_users).index_add(0, batch.pair_user_P, batch.pair_weight_P)
        torch.testing.assert_close(sums, torch.ones(batch.num_users))


def test_pairs_of_a_user_weigh_the_same(make_set: MakeSet) -> None:
    config = tiny(sampling={"max_sequences_per_user": 1000, "window_days": 1000})
    batch = one_rank(make_set([6]), config)[0]  # sequences of 1 to 5 actions, with a pair for each, but 4 at most
    assert batch.pair_weight_P.tolist() == pytest.approx([1 / (1 + 2 + 3 + 4 + 4)] * (1 + 2 + 3 + 4 + 4))


def test_the_newest_embedding_of_sasrec_weighs_as_much_as_the_others(make_set: MakeSet) -> None:
    config = tiny(sampling={"objective": "sasrec", "max_sequences_per_user": 100}, batch_users=1)
    # Of 8 actions, 2, 3, 5 and 6 are positive: positions 1, 2, 4 and 5 have a target, and a sequence each.
    pairs = sorted(pairs_of(one_rank(make_set([8]), config)[0]))
    total = (1) + (1 + 1) + (2 + 1 + 1) + (3 + 1 + 1 + 1)
    assert [(pair.end, pair.position, pair.target) for pair in pairs] == [
        *[(1, 1, 2)],
        *[(2, 1, 2), (2, 2, 3)],
        *[(4, 1, 2), (4, 2, 3), (4, 4, 5)],
        *[(5, 1, 2), (5, 2, 3), (5, 4, 5), (5, 5, 6)],
    ]
    expected = [1, 1, 1, 1, 1, 2, 1, 1, 1, 3]
    assert [pair.weight for pair in pairs] == pytest.approx([weight / total for weight in expected])


def test_sequences_are_padded_on_the_right(make_set: MakeSet) -> None:
    opened = open_training_set(make_set([5, 4]))
    sequences = collate_sequences(opened.train, opened.pin_feature, np.array([5, 1]), np.array([6, 4]))
    assert sequences.feature_RSF[:, :, 1].tolist() == [[10, 12, 0, 0], [2, 4, 6, 8]]
    assert sequences.action_type_RS.tolist() == [[5 % 3, 6 % 3, 0, 0], [1, 2, 0, 1]]
    assert sequences.surface_RS.tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]
    assert sequences.duration_RS.tolist() == [[5 / 8, 6 / 8, 0, 0], [1 / 8, 2 / 8, 3 / 8, 4 / 8]]
    half_days = [[0, 1], [1, 2, 3, 4]]
    rows = [[START_US + number * DAY_US // 2 for number in numbers] for numbers in half_days]
    assert sequences.ts_RS.tolist() == [[*rows[0], 0, 0], rows[1]]
    assert sequences.length_R.tolist() == [2, 4]


def test_random_pins_are_candidates_drawn_evenly(make_set: MakeSet) -> None:
    config = tiny(loss={"num_random": 20_000})
    batch = one_rank(make_set([10] * 3), config)[0]
    pin_N = batch.random_pin_N.numpy()
    counts = np.bincount(pin_N, minlength=30)
    assert (counts > 0).tolist() == [pin % 3 != 0 for pin in range(30)]
    assert np.abs(counts[counts > 0] - 1000).max() < 5 * 1000**0.5
    # Arrays, not lists: 40,000 lists start a full garbage collection, and a leak of another test would fail this one.
    assert np.array_equal(batch.random_feature_NF.numpy(), np.outer(pin_N, [1, 2, 3]))


def test_negatives_from_the_batch_alone_need_no_random_pins(make_set: MakeSet) -> None:
    batch = one_rank(make_set([10] * 3), tiny(loss={"negatives": "in_batch"}))[0]
    assert batch.random_pin_N.shape == (0,)
    assert batch.random_feature_NF.shape == (0, FEATURE_DIM)


def test_a_rank_may_have_no_pairs(make_set: MakeSet) -> None:
    path = make_set([1, 1, 1])  # nothing follows an only action
    for rank in range(2):
        batch = TrainingBatches(path, tiny(), rank=rank, world_size=2)[0]
        assert batch.num_users == 0
        assert batch.sequences.feature_RSF.shape == (0, 1, FEATURE_DIM)
        assert batch.query_row_Q.shape == batch.pair_pin_P.shape == batch.pair_weight_P.shape == (0,)
        assert batch.pair_feature_PF.shape == (0, FEATURE_DIM)
        assert len(batch.random_pin_N) == 16


def test_a_batch_moves_to_a_device(make_set: MakeSet) -> None:
    batch = one_rank(make_set([10] * 3), tiny())[0]
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert [tensor.shape for tensor in tensors_of(moved)] == [tensor.shape for tensor in tensors_of(batch)]
    assert_equal(batch.to(torch.device("cpu")), batch)


def test_a_batch_survives_the_way_between_processes(make_set: MakeSet) -> None:
    batch = one_rank(make_set([10] * 3), tiny())[0]
    assert_equal(pickle.loads(pickle.dumps(batch)), batch)
    loose = batch._replace(query_row_Q=batch.query_row_Q.clone())  # no longer in one piece of memory
    assert_equal(pickle.loads(pickle.dumps(loose)), batch)


# Who is in which batch


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_together_have_the_batch_of_one(make_set: MakeSet, world_size: int) -> None:
    path = make_set([2 + user % 23 for user in range(50)])
    config = tiny(sampling={"max_sequences_per_user": 2}, loss={"num_random": 31})
    for step in (0, 2, 4, 100):
        alone = one_rank(path, config)[step]
        ranks = [TrainingBatches(path, config, rank=rank, world_size=world_size)[step] for rank in range(world_size)]
        assert sorted(pair for batch in ranks for pair in pairs_of(batch)) == sorted(pairs_of(alone))
        assert torch.equal(torch.cat([batch.random_pin_N for batch in ranks]), alone.random_pin_N)
        assert sum(batch.num_users for batch in ranks) == alone.num_users


def test_an_epoch_visits_every_user_once() -> None:
    config = tiny(shuffle_batches=4)  # 16 users a batch, 4 batches a pool
    for num_users in (16, 64, 16 * 11):
        plan = BatchPlan(np.arange(num_users + 1) * 5, config)
        assert plan.batches_per_epoch == num_users // 16
        for epoch in (0, 1):
            steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
            assert sorted(np.concatenate([plan.users(step) for step in steps])) == list(range(num_users))


def test_users_who_fill_no_batch_are_left_over_at_random() -> None:
    lengths = np.arange(1, 70)
    config = tiny(model={"sequence_length": 64}, shuffle_batches=8)
    plan = BatchPlan(np.concatenate([[0], np.cumsum(lengths)]), config)
    assert plan.batches_per_epoch == 4
    left_over = []
    for epoch in range(30):
        users = np.concatenate([plan.users(step) for step in range(epoch * 4, epoch * 4 + 4)])
        assert len(set(users)) == len(users) == 64
        left_over += [*set(range(69)) - set(users)]
    assert abs(np.mean(left_over) - 34) < 5 * (69**2 / 12 / 150) ** 0.5  # neither the shortest nor the longest


def test_fewer_users_than_a_batch_are_a_batch() -> None:
    plan = BatchPlan(np.arange(8) * 5, tiny())
    assert [sorted(plan.users(step)) for step in range(3)] == [list(range(7))] * 3
    assert [plan.epoch_of(step) for step in range(3)] == [0, 1, 2]


def test_seeds_and_epochs_differ(make_set: MakeSet) -> None:
    path = make_set([20] * 32)
    first, same, next_epoch, other_seed = (
        one_rank(path, tiny(seed=seed, batch_users=32))[step] for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert_equal(first, same)
    for other in (next_epoch, other_seed):  # of the same users
        assert len(set(pairs_of(other)) & set(pairs_of(first))) < len(pairs_of(first)) / 10
        assert not torch.equal(other.random_pin_N, first.random_pin_N)
    users = [BatchPlan(np.arange(33) * 20, tiny(seed=seed)).users(step) for seed, step in ((0, 0), (0, 2), (1, 0))]
    assert len({tuple(sorted(row)) for row in users}) == 3


def test_sequences_of_about_equal_length_meet(make_set: MakeSet) -> None:
    rng = np.random.default_rng(0)
    path = make_set(rng.integers(2, 60, 512).tolist())
    changes: dict[str, Any] = {"model": {"sequence_length": 32}}
    aware, unaware = (
        padding_share(map(one_rank(path, tiny(**changes, shuffle_batches=size)).__getitem__, range(32)))
        for size in (32, 1)
    )
    assert unaware > 0.3
    assert aware < unaware / 4


def test_long_and_short_batches_come_in_random_order(make_set: MakeSet) -> None:
    path = make_set(np.random.default_rng(0).integers(2, 60, 512).tolist())
    batches = one_rank(path, tiny(shuffle_batches=32))
    means = [float(batches[step].sequences.length_R.float().mean()) for step in range(32)]
    assert abs(np.corrcoef(means, range(32))[0, 1]) < 0.5


# The loader


def test_any_number_of_workers_gives_the_same_batches(make_set: MakeSet) -> None:
    path, config = make_set([2 + user % 23 for user in range(50)]), tiny(optimizer={"num_steps": 7})

    def loaded(num_workers: int, first_step: int = 0) -> list[Batch]:
        loader = open_batches(path, config, rank=1, world_size=2, first_step=first_step, num_workers=num_workers)
        return list(loader)

    alone, helped, resumed = loaded(0), loaded(2), loaded(0, first_step=3)
    assert len(alone) == len(helped) == 7
    for one, other in zip(alone, helped, strict=True):
        assert other.sequences.feature_RSF.is_shared()
        assert_equal(one, other)
    for one, other in zip(alone[3:], resumed, strict=True):
        assert_equal(one, other)


def test_a_process_is_given_no_data(make_set: MakeSet) -> None:
    batches = one_rank(make_set([500] * 100), tiny())
    first = batches[0]
    carried = pickle.dumps(batches)
    assert len(carried) < 10_000
    assert_equal(pickle.loads(carried)[0], first)


# The knobs


def test_the_knobs_do_what_they_say(make_set: MakeSet) -> None:
    path = make_set([42])  # the last action is positive, so that each of the 41 before it has a target

    def counts(sequence_length: int = 8, **knobs: Any) -> tuple[int, int, int]:
        """Sequences, pairs, longest sequence."""
        config = tiny(model={"sequence_length": sequence_length}, sampling={"window_days": 1000, **knobs})
        batch = one_rank(path, config)[0]
        return len(batch.sequences.length_R), len(batch.pair_pin_P), int(batch.sequences.length_R.max())

    few: dict[str, Any] = {"max_sequences_per_user": 5, "max_positives_per_sequence": 1}
    every = few | {"max_sequences_per_user": 1000}
    assert counts(**few) == (5, 5, 8)
    assert counts(**every) == (41, 41, 8)
    assert counts(**every, sequence_length=30) == (41, 41, 30)
    assert counts(**every, sequence_fraction=0.5) == (20, 20, 8)
    assert counts(**every, sequence_fraction=0.001)[:2] == (1, 1)
    assert counts(**every | {"max_positives_per_sequence": 3}) == (41, (1 + 2) + 39 * 3, 8)


def test_positive_types_restrict_the_targets(make_set: MakeSet) -> None:
    path = make_set([20] * 16)
    targets = {
        types: {pair.target % 3 for pair in pairs_of(one_rank(path, tiny(sampling={"positive_types": types}))[0])}
        for types in (None, ("click",), ("repin",), ("closeup",))
    }
    assert targets == {None: {0, 2}, ("click",): {0}, ("repin",): {2}, ("closeup",): set()}  # closeups are not positive


def test_sequence_types_leave_the_others_out(make_set: MakeSet) -> None:
    """A sequence of strong actions is that of timelines which have no others."""
    path = make_set([20] * 16)
    config = tiny(model={"sequence_types": ["click", "repin"]}, sampling={"objective": "sasrec"})
    batch = one_rank(path, config)[0]
    sequences = batch.sequences
    for row, length in enumerate(sequences.length_R.tolist()):
        pins = sequences.feature_RSF[row, :length, 0].long().tolist()
        assert [pin for pin in range(pins[0], pins[-1] + 1) if pin % 3 != 1] == pins
        assert length <= config.model.sequence_length
    row_P = batch.query_row_Q[batch.pair_query_P]
    last_P = sequences.feature_RSF[row_P, batch.query_position_Q[batch.pair_query_P], 0].long().tolist()
    for last, target in zip(last_P, batch.pair_pin_P.tolist(), strict=True):
        assert target == last + (2 if last % 3 == 0 else 1)  # the next one that is no closeup
    with pytest.raises(PipelineError, match=r"model\.sequence_types: 'save'"):
        one_rank(path, tiny(model={"sequence_types": ["save"]}))


def test_an_unknown_positive_type_is_refused_before_the_start(make_set: MakeSet) -> None:
    with pytest.raises(PipelineError, match="'save'"):
        one_rank(make_set([20]), tiny(sampling={"positive_types": ["save"]}))


# Pins without a content vector


def test_pins_without_a_vector_are_read_as_zeros_and_never_predicted(make_set: MakeSet) -> None:
    """Every fourth pin has none."""
    path = make_set([40, 30, 25])
    feature = np.load(path / "pins" / "feature.npy")
    has_feature = np.arange(len(feature)) % 4 != 2
    np.save(path / "pins" / "has_feature.npy", has_feature)
    np.save(path / "pins" / "feature.npy", np.where(has_feature[:, None], feature, 0))
    data = open_training_set(path)
    assert not data.all_have_feature
    assert has_feature[data.content_candidates].all()
    assert set(data.content_candidates.tolist()) == {pin for pin in data.candidates.tolist() if has_feature[pin]}
    num_zeros = num_pairs = 0
    for objective in ("dense_all_action", "all_action", "next_action", "sasrec"):
        batches = one_rank(path, tiny(sampling={"objective": objective}, optimizer={"num_steps": 4}))
        for step in range(4):
            batch = batches[step]
            assert has_feature[batch.pair_pin_P.numpy()].all()
            assert has_feature[batch.random_pin_N.numpy()].all()
            is_candidate = np.isin(batch.pair_pin_P.numpy(), data.content_candidates)
            assert batch.pair_is_candidate_P.tolist() == is_candidate.tolist()
            num_pairs += len(batch.pair_pin_P)
            num_zeros += int((batch.sequences.feature_RSF == 0).all(-1).sum())
    assert num_pairs > 20
    assert num_zeros > 20
