import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pf_core.metrics.recall import embed_in_chunks, recall_at_k


def on_circle(*degrees: float) -> Tensor:
    angle = torch.tensor(degrees) * math.pi / 180
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def recall(
    users: Tensor, positives: list[tuple[int, int, float]], index: list[tuple[int, float]], *, k: int, **options: Any
) -> list[float]:
    """Positives are (user, pin, degrees), the index is (pin, degrees)."""
    return recall_at_k(
        users,
        torch.tensor([user for user, _, _ in positives], dtype=torch.int64),
        torch.tensor([pin for _, pin, _ in positives], dtype=torch.int64),
        on_circle(*(degrees for _, _, degrees in positives)),
        torch.tensor([pin for pin, _ in index], dtype=torch.int64),
        on_circle(*(degrees for _, degrees in index)),
        k=k,
        **options,
    ).tolist()


def test_recall_by_hand() -> None:
    """One user at 0°, an index at 10°, 20°, 30°; positives at 5°, 15°, 25° and 35° have 0, 1, 2 and 3 rivals."""
    index = [(100, 10.0), (101, 20.0), (102, 30.0)]
    positives = [(0, 1, 5.0), (0, 2, 15.0), (0, 3, 25.0), (0, 4, 35.0)]
    expected = {1: 1 / 4, 2: 2 / 4, 3: 3 / 4, 4: 4 / 4, 5: 4 / 4}
    for k, value in expected.items():
        assert recall(on_circle(0), positives, index, k=k) == [value]


def test_order_of_the_positives_and_the_chunks_do_not_matter() -> None:
    index = [(100, 10.0), (101, 190.0)]
    positives = [(2, 9, 200.0), (0, 1, 5.0), (2, 7, 181.0), (0, 2, 50.0), (3, 1, 5.0)]
    for chunk_users in (1, 2, 3, 100):
        result = recall(on_circle(0, 90, 180, 1), positives, index, k=1, chunk_users=chunk_users)
        assert [result[0], *result[2:]] == [1 / 2, 1 / 2, 1 / 1]
        assert math.isnan(result[1])


def test_users_without_positives_are_left_out() -> None:
    result = torch.tensor(recall(on_circle(0, 0, 0), [(1, 1, 5.0)], [(100, 10.0)], k=1))
    assert result.isnan().tolist() == [True, False, True]
    nobody = torch.tensor(recall(on_circle(0, 0), [], [(100, 10.0)], k=1))
    assert nobody.isnan().all()


def test_a_positive_in_the_index_does_not_compete_with_itself() -> None:
    index = [(1, 5.0), (100, 10.0), (2, 20.0)]
    assert recall(on_circle(0), [(0, 1, 5.0)], index, k=1) == [1]
    assert recall(on_circle(0), [(0, 2, 20.0)], index, k=2) == [0]  # 1 and 100 are nearer
    assert recall(on_circle(0), [(0, 2, 20.0)], index, k=3) == [1]


def test_k_may_exceed_the_index() -> None:
    assert recall(on_circle(0), [(0, 1, 170.0)], [(100, 10.0), (101, 20.0)], k=3) == [1]
    assert recall(on_circle(0), [(0, 1, 170.0)], [(100, 10.0), (101, 20.0)], k=2) == [0]
    assert recall(on_circle(0), [(0, 1, 170.0)], [], k=1) == [1]


def test_ties_count_against_the_positive() -> None:
    """Pins 100 and 101 have the very vector of the positive, which is itself in the index."""
    users, vector = torch.eye(2)[:1], torch.tensor([[0.6, 0.8]])
    ids, vectors = torch.tensor([1, 100, 101, 102]), torch.cat([vector, vector, vector, -vector])
    for k, expected in {1: 0, 2: 0, 3: 1}.items():
        result = recall_at_k(users, torch.tensor([0]), torch.tensor([1]), vector, ids, vectors, k=k)
        assert result.tolist() == [expected]


@pytest.mark.parametrize("dim", [8, 64, 256])
def test_ties_count_against_the_positive_whatever_the_rounding(dim: int) -> None:
    """Every user stands beside its positive, which has a twin in the index: another pin with the same feature.

    The twin's score comes from a matrix product and the positive's from a sum: they must not be rounded apart.
    """
    torch.manual_seed(0)
    pins = torch.nn.functional.normalize(torch.randn(300, dim), dim=1)
    users = torch.nn.functional.normalize(pins + 0.1 * torch.randn(300, dim) / dim**0.5, dim=1)
    number = torch.arange(300)
    # A tie counts against the positive: scores that are rounded apart would find 20 % to 44 % of them.
    assert recall_at_k(users, number, number, pins, number + 1000, pins, k=1).mean() == 0
    assert recall_at_k(users, number, number, pins, number, pins, k=1).mean() == 1


coordinates = st.integers(-3, 3).map(lambda number: number / 4)  # exact in float32, and many ties
vectors = st.tuples(coordinates, coordinates)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Pins have one vector each, wherever they stand."""
    table = draw(st.lists(vectors, min_size=1, max_size=12))
    users = draw(st.lists(vectors, min_size=1, max_size=5))
    pin = st.integers(0, len(table) - 1)
    index = draw(st.lists(pin, unique=True, max_size=12))
    positives = draw(st.lists(st.tuples(st.integers(0, len(users) - 1), pin), unique=True, max_size=15))
    return {"table": table, "users": users, "index": index, "positives": positives, "k": draw(st.integers(1, 6))}


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_recall_is_the_papers_formula(world: dict[str, Any]) -> None:
    table, users, k = world["table"], world["users"], world["k"]

    def inner(user: int, pin: int) -> float:
        return sum(left * right for left, right in zip(users[user], table[pin], strict=True))

    got = recall_at_k(
        torch.tensor(users),
        torch.tensor([user for user, _ in world["positives"]], dtype=torch.int64),
        torch.tensor([pin for _, pin in world["positives"]], dtype=torch.int64),
        torch.tensor([table[pin] for _, pin in world["positives"]]).reshape(-1, 2),
        torch.tensor(world["index"], dtype=torch.int64),
        torch.tensor([table[pin] for pin in world["index"]]).reshape(-1, 2),
        k=k,
        chunk_users=2,
    ).tolist()
    for user in range(len(users)):
        mine = [pin for owner, pin in world["positives"] if owner == user]
        hits = sum(
            sum(other != pin and inner(user, pin) <= inner(user, other) for other in world["index"]) < k for pin in mine
        )
        assert math.isnan(got[user]) if not mine else got[user] == hits / len(mine)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 8, 9])
def test_embedding_in_chunks_keeps_the_order(num_rows: int) -> None:
    seen: list[int] = []

    def embed(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return rows.float()[:, None] * 2

    assert embed_in_chunks(embed, num_rows, chunk_rows=4).squeeze(1).tolist() == [2 * row for row in range(num_rows)]
    assert max(seen) <= 4
