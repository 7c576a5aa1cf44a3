import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from pf_core.errors import PipelineError
from pf_core.hashing import is_held_out
from pf_core.pins.coengagement import CoengagementConfig, PinVectors, compute_ppmi, count_pairs, learn_pin_vectors
from pf_core.schemas import TIMESTAMP

START = datetime(2026, 1, 1, tzinfo=UTC)
UNTIL = START + timedelta(days=10)
Action = tuple[Any, Any, float]  # user, pin, hours since START

NUM_COMMUNITIES, PINS_EACH, USERS_EACH, ACTIONS_EACH = 4, 15, 40, 20


def write_actions(path: Path, actions: Sequence[Action], *, string_ids: bool = False) -> Path:
    users, pins, hours = ([action[column] for action in actions] for column in range(3))
    id_type = pa.string() if string_ids else pa.int64()
    table = pa.table(
        {
            "user_id": pa.array(users, id_type),
            "ts": pa.array([START + timedelta(hours=hour) for hour in hours], TIMESTAMP),
            "pin_id": pa.array(pins, id_type),
            "action_type": pa.array(["closeup"] * len(actions)),
            "surface": pa.array(["homefeed"] * len(actions)),
            "duration_s": pa.array([1.0] * len(actions), pa.float32()),
        }
    )
    pq.write_table(table, path)
    return path


def planted_actions() -> list[Action]:
    """Pin p belongs to community p // PINS_EACH; a user stays within one community."""
    rng = np.random.default_rng(7)
    actions: list[Action] = []
    for user in range(NUM_COMMUNITIES * USERS_EACH):
        first_pin = user % NUM_COMMUNITIES * PINS_EACH
        pins = first_pin + rng.integers(0, PINS_EACH, ACTIONS_EACH)
        actions += [(1000 + user, int(pin), float(hour)) for hour, pin in enumerate(pins)]
    return actions


def learn(files: Sequence[Path], tmp_path: Path, **options: Any) -> PinVectors:
    config = CoengagementConfig(**({"dim": 8} | options))
    return learn_pin_vectors(files, until=UNTIL, config=config, memory_limit="200MB", temp_dir=tmp_path / "spill")


def count(actions: Sequence[Action], tmp_path: Path, **options: Any) -> tuple[list[Any], np.ndarray, dict[str, int]]:
    file = write_actions(tmp_path / "actions.parquet", actions)
    config = CoengagementConfig(**({"dim": 2, "min_count": 1} | options))
    pin_id, _, counts, tallies = count_pairs([file], UNTIL, config, "200MB", tmp_path / "spill")
    return pin_id.to_pylist(), counts.toarray(), tallies


def features(learned: PinVectors) -> np.ndarray:
    column = learned.table["feature"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


def cosines(learned: PinVectors) -> np.ndarray:
    return features(learned) @ features(learned).T


def test_pins_of_a_community_are_close_and_others_far(tmp_path: Path) -> None:
    file = write_actions(tmp_path / "actions.parquet", planted_actions())
    learned = learn([file], tmp_path)
    community = learned.table["pin_id"].to_numpy() // PINS_EACH
    same = community[:, None] == community[None, :]
    cosine = features(learned) @ features(learned).T
    assert learned.num_pins_kept == NUM_COMMUNITIES * PINS_EACH
    assert cosine[same].min() > 0.5
    assert np.abs(cosine[~same]).max() < 0.05


@pytest.mark.parametrize("string_ids", [False, True])
def test_actions_of_held_out_users_change_nothing(tmp_path: Path, string_ids: bool) -> None:
    def name(number: int) -> Any:
        return f"{number:04d}" if string_ids else number

    actions = [(name(user), name(pin), hour) for user, pin, hour in planted_actions()]
    ids = pa.array([name(user) for user in range(3000)])
    held_out = ids.filter(pa.array(is_held_out(ids, 0.1))).to_pylist()
    assert len(held_out) > 200
    trained = [action for action in actions if action[0] not in held_out]
    assert len(trained) < len(actions)
    planted = [(user, name(pin), float(hour)) for user in held_out for hour, pin in enumerate((0, 17, 31, 999))]
    without = write_actions(tmp_path / "without.parquet", trained, string_ids=string_ids)
    with_planted = write_actions(tmp_path / "with.parquet", [*actions, *planted], string_ids=string_ids)
    expected = learn([without], tmp_path, held_out_share=0.1)
    learned = learn([with_planted], tmp_path, held_out_share=0.1)
    assert learned == expected
    assert features(learned).tobytes() == features(expected).tobytes()
    assert expected.num_actions == len(trained)
    assert learn([with_planted], tmp_path, held_out_share=0.0).num_actions == len(actions) + len(planted)


def test_actions_on_pins_with_a_vector_are_counted(tmp_path: Path) -> None:
    rare: list[Action] = [(1000 + user, 500, 100.0 + hour) for user in range(4) for hour in range(3)]
    learned = learn([write_actions(tmp_path / "actions.parquet", [*planted_actions(), *rare])], tmp_path)
    assert learned.num_actions_kept == len(planted_actions())
    assert learned.num_actions == len(planted_actions()) + 4 * 3


def test_table_is_typed_sorted_and_unit_norm(tmp_path: Path) -> None:
    learned = learn([write_actions(tmp_path / "actions.parquet", planted_actions())], tmp_path)
    expected = pa.schema([pa.field("pin_id", pa.int64()), pa.field("feature", pa.list_(pa.float32(), 8))])
    assert learned.table.schema == expected
    assert learned.table["pin_id"].to_pylist() == list(range(NUM_COMMUNITIES * PINS_EACH))
    np.testing.assert_allclose(np.linalg.norm(features(learned), axis=1), 1, atol=1e-6)
    assert learned.num_actions == NUM_COMMUNITIES * USERS_EACH * ACTIONS_EACH
    assert list((tmp_path / "spill").iterdir()) == []


def test_counts_of_a_hand_worked_list(tmp_path: Path) -> None:
    # User 1 sees 10, 20, 30, 10 (20 twice in a row counts once); user 2 sees 30, 10. Written out of order.
    actions = [(1, 30, 3.0), (1, 10, 0.0), (1, 20, 2.0), (1, 20, 1.0), (1, 10, 4.0), (2, 10, 1.0), (2, 30, 0.0)]
    pin_id, counts, tallies = count(actions, tmp_path, window_actions=2)
    pair_10_20 = 2 + 1  # next to each other, then across 30
    pair_10_30 = 1 + 2 + 2  # across 20, then next to each other, then user 2
    pair_20_30 = 2
    assert pin_id == [10, 20, 30]
    expected = [[0, pair_10_20, pair_10_30], [pair_10_20, 0, pair_20_30], [pair_10_30, pair_20_30, 0]]
    assert counts.tolist() == expected
    assert tallies["num_pairs"] == tallies["num_pairs_seen"] == 3
    assert tallies["num_actions"] == len(actions)


def test_a_pin_does_not_pair_with_itself(tmp_path: Path) -> None:
    pin_id, counts, _ = count([(1, 10, 0.0), (1, 20, 1.0), (1, 10, 2.0)], tmp_path, window_actions=3)
    assert pin_id == [10, 20]
    assert counts.tolist() == [[0, 3 + 3], [3 + 3, 0]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 300)), min_size=1),
    window_actions=st.integers(1, 40),
    min_count=st.integers(1, 2),
)
def test_counts_agree_with_a_plain_loop(
    actions: list[tuple[int, int, int]], window_actions: int, min_count: int, tmp_path: Path
) -> None:
    """Hour 240 is `until`; the loop reads lists of users, one pair at a time."""
    past = sorted((user, hour, pin) for user, pin, hour in actions if hour < 240)
    assume(past)
    users_of_pin = {pin: {user for user, _, other in past if other == pin} for _, _, pin in past}
    kept = sorted(pin for pin, users in users_of_pin.items() if len(users) >= min_count)
    expected = np.zeros((len(kept), len(kept)))
    for user in {user for user, _, _ in past}:
        seen = [kept.index(pin) for other, _, pin in past if other == user and pin in kept]
        moves = [pin for pin, _ in groupby(seen)]
        for (i, first), (j, second) in combinations(enumerate(moves), 2):
            if j - i <= window_actions and first != second:
                expected[first, second] += window_actions + 1 - (j - i)
                expected[second, first] += window_actions + 1 - (j - i)

    options = {"window_actions": window_actions, "min_count": min_count}
    pin_id, counts, tallies = count([(u, p, float(h)) for u, p, h in actions], tmp_path, **options)
    assert pin_id == kept
    assert counts.tolist() == expected.tolist()
    assert tallies["num_pins_rare"] == len(users_of_pin) - len(kept)


def test_ppmi_of_three_pins() -> None:
    # Counts 4 (pins 0 and 1) and 1 (pins 1 and 2): the pins' totals are 4, 5 and 1.
    counts = csr_array(np.array([[0.0, 4, 0], [4, 0, 1], [0, 1, 0]]))
    pair_01 = math.log((4 / 10) / (4 / 10 * 5 / 10))
    pair_12 = math.log((1 / 10) / (5 / 10 * 1 / 10))
    expected = [[0, pair_01, 0], [pair_01, 0, pair_12], [0, pair_12, 0]]
    np.testing.assert_allclose(compute_ppmi(counts, 1.0).toarray(), expected)

    roots = math.sqrt(4) + math.sqrt(5) + math.sqrt(1)
    smoothed = compute_ppmi(counts, 0.5).toarray()
    assert smoothed[0, 1] == pytest.approx(math.log((4 / 4) / (math.sqrt(5) / roots)))
    assert smoothed[1, 0] == pytest.approx(math.log((4 / 5) / (math.sqrt(4) / roots)))

    uniform = compute_ppmi(counts, 0.0)
    assert uniform.toarray()[1].tolist() == pytest.approx([math.log((4 / 5) / (1 / 3)), 0, 0])  # 1/5 < 1/3
    assert (uniform.nnz, counts.nnz) == (3, 4)


def test_a_pin_without_counts_is_no_context() -> None:
    counts = csr_array(np.array([[0.0, 2, 0], [2, 0, 0], [0, 0, 0]]))
    pair = math.log((2 / 2) / (1 / 2))
    assert compute_ppmi(counts, 0.0).toarray() == pytest.approx(np.array([[0, pair, 0], [pair, 0, 0], [0, 0, 0]]))


def test_nothing_at_or_after_until_has_influence(tmp_path: Path) -> None:
    past = planted_actions()
    clean = learn([write_actions(tmp_path / "past.parquet", past)], tmp_path)
    until_hour = (UNTIL - START) / timedelta(hours=1)
    for name, shift in (("at", 0), ("after", 5)):
        # Every user mixes all communities, and new pins appear.
        future = [(user, (pin * 7) % 90, until_hour + shift) for user, pin, _ in past]
        mixed = write_actions(tmp_path / f"{name}.parquet", past + future)
        separate = write_actions(tmp_path / f"only-{name}.parquet", future)
        assert learn([mixed], tmp_path) == clean
        assert learn([tmp_path / "past.parquet", separate], tmp_path) == clean


def test_an_action_just_before_until_counts(tmp_path: Path) -> None:
    last_hour = (UNTIL - START) / timedelta(hours=1) - 1e-6
    _, _, tallies = count([(1, 10, 0.0), (1, 20, last_hour)], tmp_path)
    assert tallies["num_actions"] == 2


def test_order_of_rows_and_files_does_not_matter(tmp_path: Path) -> None:
    actions = planted_actions()
    clean = learn([write_actions(tmp_path / "all.parquet", actions)], tmp_path)
    shuffled = [actions[i] for i in np.random.default_rng(3).permutation(len(actions))]
    halves = [write_actions(tmp_path / f"{i}.parquet", shuffled[i::2]) for i in (0, 1)]
    assert learn(halves, tmp_path) == clean
    assert learn(halves[::-1], tmp_path) == clean


def test_string_ids_give_the_vectors_of_int_ids(tmp_path: Path) -> None:
    actions = planted_actions()
    named = [(f"u{user}", f"p{pin:03d}", hour) for user, pin, hour in actions]
    ints = learn([write_actions(tmp_path / "ints.parquet", actions)], tmp_path)
    strings = learn([write_actions(tmp_path / "strings.parquet", named, string_ids=True)], tmp_path)
    assert strings.table.schema.field("pin_id").type == pa.string()
    assert strings.table["pin_id"].to_pylist() == [f"p{pin:03d}" for pin in ints.table["pin_id"].to_pylist()]
    assert strings.table["feature"] == ints.table["feature"]


def test_every_pin_is_accounted_for(tmp_path: Path) -> None:
    lonely = [(5000 + user, 777, 0.0) for user in range(9)]  # enough users, but never beside another pin
    rare = [(1000, 888, 50.0), (1000, 889, 51.0)]
    file = write_actions(tmp_path / "actions.parquet", planted_actions() + lonely + rare)
    learned = learn([file], tmp_path)
    num_planted = NUM_COMMUNITIES * PINS_EACH
    assert (learned.num_pins_seen, learned.num_pins_kept) == (num_planted + 3, num_planted)
    assert (learned.num_pins_rare, learned.num_pins_without_vector, learned.num_pins_over_limit) == (2, 1, 0)
    assert 777 not in learned.table["pin_id"].to_pylist()


def test_a_pin_that_the_svd_does_not_keep_gets_no_vector(tmp_path: Path) -> None:
    # The four planted communities are the four strongest directions; a pair apart from them is a fifth.
    apart = [(5000 + user, pin, float(pin - 777)) for user in range(9) for pin in (777, 778)]
    file = write_actions(tmp_path / "actions.parquet", planted_actions() + apart)
    narrow, wide = learn([file], tmp_path, dim=NUM_COMMUNITIES), learn([file], tmp_path, dim=30)
    assert narrow.table["pin_id"].to_pylist() == list(range(NUM_COMMUNITIES * PINS_EACH))
    assert narrow.num_pins_without_vector == 2
    assert wide.num_pins_without_vector == 0


def test_limits_keep_what_is_most_engaged(tmp_path: Path) -> None:
    # Pin 40 has three users, 30 and 20 two, 10 one; 20 comes before 30.
    actions = [(1, 40, 0.0), (1, 30, 1.0), (2, 40, 0.0), (2, 30, 1.0), (3, 40, 0.0), (3, 20, 9.0), (4, 20, 0.0)]
    pin_id, _, tallies = count([*actions, (4, 10, 1.0)], tmp_path, dim=1, max_pins=2)
    assert pin_id == [20, 40]
    assert tallies["num_pins_over_limit"] == 2
    pin_id, counts, tallies = count([*actions, (4, 10, 1.0)], tmp_path, window_actions=1, max_pairs=1)
    assert (tallies["num_pairs_seen"], tallies["num_pairs"]) == (3, 1)
    assert counts[pin_id.index(30), pin_id.index(40)] == 2


def test_many_pins_and_one_heavy_user(tmp_path: Path) -> None:
    """Linear in actions: 60,000 pins in one list make window_actions pairs each, not 60,000."""
    num_pins, window = 60_000, 3
    file = write_actions(tmp_path / "actions.parquet", [(1, pin, pin / num_pins) for pin in range(num_pins)])
    config = CoengagementConfig(min_count=1, window_actions=window)
    pin_id, _, counts, tallies = count_pairs([file], UNTIL, config, "200MB", tmp_path / "spill")
    assert len(pin_id) == num_pins
    assert tallies["num_pairs"] == window * num_pins - (1 + 2 + 3)
    assert counts.sum() == 2 * (3 * (num_pins - 1) + 2 * (num_pins - 2) + 1 * (num_pins - 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"window_actions": 0}, "window_actions is 0"),
        ({"window_actions": 41}, "take at most 40"),
        ({"min_count": 0}, "min_count is 0"),
        ({"dim": 64, "max_pins": 64}, "take 65 or more"),
        ({"max_pairs": 0}, "max_pairs is 0"),
        ({"context_smoothing": 1.5}, "context_smoothing is 1.5"),
        ({"singular_power": 0.0}, "singular_power is 0.0"),
    ],
)
def test_configuration_is_validated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoengagementConfig(**options)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    file = write_actions(tmp_path / "actions.parquet", [(u, p, float(p)) for u in range(9) for p in range(4)])
    with pytest.raises(PipelineError, match=r"only 4 have 5 users .* set a smaller `dim` or `min_count`"):
        learn([file], tmp_path)
    with pytest.raises(PipelineError, match=r"only 0 have 10 users"):
        learn([file], tmp_path, min_count=10)
    with pytest.raises(PipelineError, match="no action files"):
        learn([], tmp_path)
    late = write_actions(tmp_path / "late.parquet", [(1, 1, 24.0 * 10)])
    with pytest.raises(PipelineError, match=r"no action of a training user is earlier than 2026-01-11T00:00:00\+00:00"):
        learn([late], tmp_path)
    naive = UNTIL.replace(tzinfo=None)
    with pytest.raises(PipelineError, match="has no time zone"):
        learn_pin_vectors([file], until=naive, config=CoengagementConfig(), temp_dir=tmp_path)
