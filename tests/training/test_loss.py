"""The loss by hand (zero vectors make every score 0, so that only counts remain) and against plain autograd loops."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pf_core.config.training import LossConfig
from pf_core.training.loss import MIN_TEMPERATURE, Pairs, RetrievalLoss, mask_own_positives, spread

NUM_CANDIDATES = 1000


def pairs_of(pins: dict[int, list[int]], *, not_candidates: tuple[int, ...] = (), shared_query: bool = False) -> Pairs:
    """`{user: pins}`; each pair has a query of its own, or each user one for all of its pairs."""
    user = [number for number, mine in pins.items() for _ in mine]
    pin = [pin for mine in pins.values() for pin in mine]
    return Pairs(
        query_P=torch.tensor(user if shared_query else list(range(len(pin))), dtype=torch.int64),
        user_P=torch.tensor(user, dtype=torch.int64),
        weight_P=torch.tensor([1 / len(pins[number]) for number in user]),
        pin_P=torch.tensor(pin, dtype=torch.int64),
        is_candidate_P=torch.tensor([number not in not_candidates for number in pin], dtype=torch.bool),
        num_users=sum(bool(mine) for mine in pins.values()),
    )


def make_loss(seen: list[int] | None = None, **config: Any) -> RetrievalLoss:
    loss = RetrievalLoss(LossConfig(**{"sketch_width": 1 << 16, **config}), num_candidates=NUM_CANDIDATES)
    loss.sketch.add(torch.tensor(seen or [], dtype=torch.int64))
    return loss


def zero_loss(loss: RetrievalLoss, pairs: Pairs, random: list[int]) -> float:
    """Every score is 0."""
    num_queries = int(pairs.query_P.max()) + 1
    zeros = [torch.zeros(num, 4) for num in (num_queries, len(pairs.pin_P), len(random))]
    return float(loss(zeros[0], pairs, zeros[1], zeros[2], torch.tensor(random, dtype=torch.int64)).detach())


# --- pool, masking, weights -----------------------------------------------------------------------


@pytest.mark.parametrize(("negatives", "num"), [("in_batch", 2), ("random", 3), ("mixed", 2 + 3)])
def test_the_pool_holds_what_its_kind_says(negatives: str, num: int) -> None:
    """Three users with one pin each: a row meets the two others' pins and the three random ones."""
    loss = make_loss(negatives=negatives, log_q="none")
    assert zero_loss(loss, pairs_of({0: [1], 1: [2], 2: [3]}), [10, 11, 11]) == pytest.approx(math.log(1 + num))


def test_in_batch_negatives_are_capped_evenly() -> None:
    pairs = pairs_of({user: [user] for user in range(100)})
    loss = make_loss(negatives="mixed", log_q="none", max_in_batch=10)
    inside, outside = math.log(1 + 9 + 2), math.log(1 + 10 + 2)  # a row whose pin was kept is masked against itself
    assert zero_loss(loss, pairs, [500, 501]) == pytest.approx((10 * inside + 90 * outside) / 100)
    expected: dict[tuple[int, int], list[int]] = {
        (0, 5): [],
        (3, 5): [0, 1, 2],
        (5, 5): [0, 1, 2, 3, 4],
        (7, 5): [0, 1, 2, 4, 5],
        (100, 7): [0, 14, 28, 42, 57, 71, 85],
        (5001, 5000): list(range(5000)),
    }
    for (num_rows, cap), rows in expected.items():
        assert spread(num_rows, cap, torch.device("cpu")).tolist() == rows


def test_a_users_positives_are_masked_whoever_brought_them() -> None:
    """User 0 likes 1 and 2; user 1 brings 2 as well, and the random draw brings 1 and 3."""
    pairs = pairs_of({0: [1, 2], 1: [2], 2: [3]})
    masked = mask_own_positives(pairs, torch.tensor([1, 2, 2, 3, 1, 3, 9]))
    assert masked.tolist() == [
        [True, True, True, False, True, False, False],
        [False, True, True, False, False, False, False],
        [False, False, False, True, False, True, False],
    ]
    loss = make_loss(negatives="mixed", log_q="none")
    rows = {0: math.log(1 + 3), 1: math.log(1 + 5), 2: math.log(1 + 5)}  # unmasked entries of each user's rows
    assert zero_loss(loss, pairs, [1, 3, 9]) == pytest.approx((rows[0] + rows[1] + rows[2]) / 3)


def test_an_own_positive_counts_once_however_often_it_stands_in_the_pool() -> None:
    pairs = pairs_of({0: [1, 1], 1: [1], 2: [4]})  # two queries of user 0 predict the same pin
    loss = make_loss(negatives="mixed", log_q="none")
    expected = (math.log(1 + 1) + math.log(1 + 1) + math.log(1 + 3 + 2)) / 3
    assert zero_loss(loss, pairs, [1, 1]) == pytest.approx(expected)


def test_users_weigh_the_same() -> None:
    """One pair against three: the rows of user 0 have 3 negatives, those of user 1 have 1."""
    loss = make_loss(negatives="in_batch", log_q="none")
    expected = (math.log(1 + 3) + (math.log(1 + 1) * 3) / 3) / 2
    assert zero_loss(loss, pairs_of({0: [1], 1: [2, 3, 4]}), []) == pytest.approx(expected)


def test_weights_are_taken_as_given() -> None:
    pairs = pairs_of({0: [1, 2], 1: [2]})._replace(weight_P=torch.tensor([0.9, 0.1, 1.0]))
    user, positive, loss = torch.eye(3), torch.eye(3).flip(0), make_loss(negatives="random", log_q="none")
    each = [F.softplus((user[row] @ torch.eye(3)[0] - user[row] @ positive[row]) / 0.1) for row in range(3)]
    value = loss(user, pairs, positive, torch.eye(3)[:1], torch.tensor([77])).detach()
    assert float(value) == pytest.approx(float((0.9 * each[0] + 0.1 * each[1] + each[2]) / 2), rel=1e-5)


@pytest.mark.parametrize("log_q", ["none", "negatives", "all", "corrected"])
def test_a_row_without_negatives_is_harmless(log_q: str) -> None:
    """One user owns every pin of the pool."""
    pairs, loss = pairs_of({0: [1, 2]}), make_loss(negatives="mixed", log_q=log_q)
    tensors = [torch.randn(num, 4, requires_grad=True) for num in (2, 2, 2)]
    value = loss(tensors[0], pairs, tensors[1], tensors[2], torch.tensor([2, 1]))
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-6)
    for gradient in (*(tensor.grad for tensor in tensors), loss.temperature.grad):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("negatives", ["in_batch", "random", "mixed"])
def test_no_pairs_give_zero_loss_and_zero_gradients(kind: str, negatives: str) -> None:
    loss = make_loss(kind=kind, negatives=negatives, log_q="none" if kind == "bce" else "all")
    weight, inputs = torch.ones(4, 4, requires_grad=True), [torch.randn(num, 4) for num in (2, 0, 3)]
    user, positive, random = (torch.cat([part @ weight]) for part in inputs)
    value = loss(user, pairs_of({}), positive, random, torch.arange(3))
    value.backward()
    assert float(value.detach()) == 0
    assert torch.equal(weight.grad, torch.zeros(4, 4))
    assert float(loss.temperature.grad) == 0


# --- log Q ----------------------------------------------------------------------------------------


def test_log_q_of_a_mixed_pool_by_hand() -> None:
    """Seen: pin 1 four times, pin 2 once, pin 3 never; then the batch {0: 1, 1: 2, 2: 3}: shares 5/8, 2/8, 1/8."""
    seen, pins, random = [1, 1, 1, 1, 2], {0: [1], 1: [2], 2: [3]}, [2, 9]
    at_random = 2 / NUM_CANDIDATES
    q = {1: 3 * 5 / 8 + at_random, 2: 3 * 2 / 8 + at_random, 3: 3 * 1 / 8, 9: at_random}  # 3 cannot be drawn
    rows = [
        (q[1], [q[2], q[3], q[2], q[9]]),
        (q[2], [q[1], q[3], q[9]]),  # the random 2 is user 1's own
        (q[3], [q[1], q[2], q[2], q[9]]),
    ]
    pairs = pairs_of(pins, not_candidates=(3,))
    corrected = [math.log(1 + sum(own / other for other in others)) for own, others in rows]
    assert zero_loss(make_loss(seen, log_q="all"), pairs, random) == pytest.approx(sum(corrected) / 3, rel=1e-5)
    uncorrected = [math.log(1 + sum(1 / other for other in others)) for _, others in rows]
    assert zero_loss(make_loss(seen, log_q="negatives"), pairs, random) == pytest.approx(sum(uncorrected) / 3, rel=1e-5)
    sums = [sum(1 / other for other in others) for _, others in rows]
    weighted = [(1 - 1 / (1 + total)) * math.log(total) for total in sums]
    assert zero_loss(make_loss(seen, log_q="corrected"), pairs, random) == pytest.approx(sum(weighted) / 3, rel=1e-5)


def test_log_q_of_in_batch_negatives_knows_the_cap_and_no_random_draw() -> None:
    pins = {0: [1], 1: [2], 2: [3], 3: [3]}  # shares 1/4, 1/4, 2/4; two entries stay: pins 1 and 3
    q = {1: 2 * 1 / 4, 2: 2 * 1 / 4, 3: 2 * 2 / 4}
    met = {1: [3], 2: [1, 3], 3: [1]}  # what a row with this positive meets
    both = [math.log(1 + sum(q[pin] / q[other] for other in met[pin])) for pin in (1, 2, 3, 3)]
    loss = make_loss(negatives="in_batch", log_q="all", max_in_batch=2)
    assert zero_loss(loss, pairs_of(pins), [1, 2, 3]) == pytest.approx(sum(both) / 4, rel=1e-5)
    alone = [math.log(1 + sum(1 / q[other] for other in met[pin])) for pin in (1, 2, 3, 3)]
    loss = make_loss(negatives="in_batch", log_q="negatives", max_in_batch=2)
    assert zero_loss(loss, pairs_of(pins), [1, 2, 3]) == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_random_negatives_alone_need_no_correction() -> None:
    pairs, random = pairs_of({0: [1, 2], 1: [3]}, not_candidates=(3,)), torch.tensor([1, 8, 9])
    gradients = []
    for log_q in ("none", "all"):
        torch.manual_seed(0)
        tensors = [F.normalize(torch.randn(3, 4), dim=1).requires_grad_() for _ in range(3)]
        loss = make_loss([1, 1, 2], negatives="random", log_q=log_q)
        value = loss(tensors[0], pairs, tensors[1], tensors[2], random)
        value.backward()
        gradients.append([value.detach(), loss.temperature.grad, *(tensor.grad for tensor in tensors)])
    for none, corrected in zip(*gradients, strict=True):
        torch.testing.assert_close(none, corrected, rtol=1e-4, atol=1e-6)


# --- against plain autograd -----------------------------------------------------------------------


def plain_loss(
    log_q: str, tensors: list[Tensor], tau: Tensor, pairs: Pairs, random: list[int], seen: list[int], negatives: str
) -> Tensor:
    """Row by row in float64, nothing shared with the code: exact counts, sets and logsumexp."""
    user, positive, drawn = tensors
    pins, users = pairs.pin_P.tolist(), pairs.user_P.tolist()
    entries = [(pin, positive[row]) for row, pin in enumerate(pins)] if negatives != "random" else []
    num_in_batch = len(entries)
    entries += [(pin, drawn[row]) for row, pin in enumerate(random)] if negatives != "in_batch" else []
    num_random = len(entries) - num_in_batch
    counts, candidate = Counter([*seen, *pins]), dict(zip(pins, pairs.is_candidate_P.tolist(), strict=True))

    def log_count(pin: int) -> float:
        if negatives == "random":
            return math.log(num_random / NUM_CANDIDATES)
        uniform = num_random / NUM_CANDIDATES if candidate.get(pin, True) else 0
        return math.log(num_in_batch * counts[pin] / counts.total() + uniform)

    total = torch.zeros((), dtype=torch.float64)
    for row, (pin, owner) in enumerate(zip(pins, users, strict=True)):
        vector = user[int(pairs.query_P[row])]
        own = {other for other, its_user in zip(pins, users, strict=True) if its_user == owner}
        rest = [
            vector @ entry / tau - (log_count(other) if log_q != "none" else 0)
            for other, entry in entries
            if other not in own
        ]
        mine = vector @ positive[row] / tau - (log_count(pin) if log_q == "all" else 0)
        if log_q == "corrected":
            # arXiv 2507.09331: stop_gradient(1 - P(positive)) * -log(e^positive / sum of the corrected negatives)
            uncertain = 1 - torch.softmax(torch.stack([mine, *rest]), 0)[0].detach()
            each = uncertain * (torch.stack(rest).logsumexp(0) - mine)
        else:
            each = -torch.log_softmax(torch.stack([mine, *rest]), 0)[0]
        total = total + each / users.count(owner) / len(set(users))
    return total


def both_ways(log_q: str, negatives: str, chunk_rows: int, tau: float) -> tuple[list[Tensor], list[Tensor]]:
    """(value and gradients of the code, the same of the plain loops)."""
    pairs = pairs_of(
        {0: [3], 1: [3, 7, 8], 2: [9, 7], 3: [20], 4: [5, 5]}, not_candidates=(20, 8), shared_query=tau == 0.1
    )
    random, seen = [3, 7, 40, 41, 5, 9, 41], [3] * 6 + [20, 20, 9, 40]
    torch.manual_seed(3)
    sizes = (int(pairs.query_P.max()) + 1, len(pairs.pin_P), len(random))
    tensors = [F.normalize(torch.randn(size, 6), dim=1).requires_grad_() for size in sizes]
    loss = make_loss(seen, negatives=negatives, log_q=log_q, chunk_rows=chunk_rows, temperature=tau)
    value = loss(tensors[0], pairs, tensors[1], tensors[2], torch.tensor(random))
    (3 * value).backward()  # an upstream gradient other than 1
    plain = [tensor.detach().double().requires_grad_() for tensor in tensors]
    plain_tau = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    expected = plain_loss(log_q, plain, plain_tau, pairs, random, seen, negatives)
    (3 * expected).backward()
    got = [value.detach(), loss.temperature.grad, *(tensor.grad for tensor in tensors)]
    return got, [expected.detach(), plain_tau.grad, *(tensor.grad for tensor in plain)]


@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 9, 100])
@pytest.mark.parametrize("log_q", ["none", "negatives", "all", "corrected"])
@pytest.mark.parametrize(("negatives", "tau"), [("mixed", 0.1), ("in_batch", 0.5), ("random", 0.02)])
def test_value_and_gradients_equal_plain_autograd(negatives: str, tau: float, log_q: str, chunk_rows: int) -> None:
    got, expected = both_ways(log_q, negatives, chunk_rows, tau)
    for ours, plain in zip(got, expected, strict=True):
        if plain is None:  # in_batch has no use for the random pins
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours.double(), plain, rtol=2e-4, atol=2e-5)


def test_corrected_has_the_gradient_of_negatives() -> None:
    ours, plain = both_ways("corrected", "mixed", 4, 0.1)[0], both_ways("negatives", "mixed", 4, 0.1)[0]
    assert float(ours[0]) != pytest.approx(float(plain[0]), rel=1e-3)
    for one, other in zip(ours[1:], plain[1:], strict=True):
        torch.testing.assert_close(one, other)


def test_no_correction_and_a_full_pool_are_cross_entropy() -> None:
    torch.manual_seed(0)
    num_pins, num_users = 40, 11
    user = F.normalize(torch.randn(num_users, 6), dim=1).requires_grad_()
    table = F.normalize(torch.randn(num_pins, 6), dim=1).requires_grad_()
    target = torch.randint(0, num_pins, (num_users,))
    pairs = pairs_of({row: [int(pin)] for row, pin in enumerate(target)})
    loss = make_loss(negatives="random", log_q="none", chunk_rows=4, temperature=0.07)
    value = loss(user, pairs, table[target], table, torch.arange(num_pins))
    ours = torch.autograd.grad(value, [user, table, loss.temperature])
    tau = torch.tensor(0.07, requires_grad=True)
    expected = F.cross_entropy(user @ table.T / tau, target)
    torch.testing.assert_close(value, expected)
    for mine, plain in zip(ours, torch.autograd.grad(expected, [user, table, tau]), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


# --- binary cross-entropy and the temperature -----------------------------------------------------


def test_binary_cross_entropy_by_hand() -> None:
    """Every random pin has the same vector, so that it does not matter which one a pair draws."""
    user, positive = torch.tensor([[1.0, 0], [0.6, 0.8]]), torch.tensor([[0.8, 0.6], [0, 1.0]])
    loss = make_loss(kind="bce", log_q="none", negatives="random", temperature=0.5)
    negative = torch.tensor([[0, -1.0]]).expand(5, 2)
    value = loss(user, pairs_of({0: [1], 1: [2]}), positive, negative, torch.arange(5) + 10)
    rows = [(0.8 / 0.5, 0.0), (0.8 / 0.5, -0.8 / 0.5)]
    expected = [math.log(1 + math.exp(-right)) + math.log(1 + math.exp(wrong)) for right, wrong in rows]
    assert float(value.detach()) == pytest.approx(sum(expected) / 2, rel=1e-6)
    masked = loss(user, pairs_of({0: [1], 1: [1]}), positive, negative, torch.ones(5, dtype=torch.int64))
    assert float(masked.detach()) == pytest.approx(
        sum(math.log(1 + math.exp(-right)) for right, _ in rows) / 2, rel=1e-6
    )


@pytest.mark.parametrize("negatives", ["in_batch", "random", "mixed"])
def test_binary_cross_entropy_draws_every_entry_of_the_pool(negatives: str) -> None:
    loss = make_loss(kind="bce", log_q="none", negatives=negatives)
    pairs = pairs_of({user: [user] for user in range(12)})
    drawn: Counter[int] = Counter()
    for _ in range(600):
        pool, _, _ = loss._gather_pool(pairs, torch.zeros(12, 2), torch.zeros(8, 2), torch.arange(8) + 100)
        drawn[int(pool.drawn_P[3])] += 1
    num_pool = {"in_batch": 12, "random": 8, "mixed": 20}[negatives]
    assert sorted(drawn) == list(range(num_pool))
    assert max(drawn.values()) < 3 * 600 / num_pool


def test_the_temperature_stays_above_its_bound_and_can_leave_it() -> None:
    loss = make_loss(temperature=0.011, log_q="none", negatives="in_batch")
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e3)
    user = torch.tensor([[1.0, 0], [0, 1]])
    temperatures = []
    for positive in (torch.eye(2), torch.eye(2).flip(0)):  # what the model has learned, then the opposite
        optimizer.zero_grad()
        loss(user, pairs_of({0: [1], 1: [2]}), 0.01 * positive, torch.zeros(0, 2), torch.arange(0)).backward()
        assert float(loss.temperature.grad) != 0
        optimizer.step()
        loss.clamp_temperature()
        temperatures.append(float(loss.temperature.detach()))
    assert MIN_TEMPERATURE == 0.01
    assert temperatures[0] == pytest.approx(MIN_TEMPERATURE)
    assert temperatures[1] > MIN_TEMPERATURE
