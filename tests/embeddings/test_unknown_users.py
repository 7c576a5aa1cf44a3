"""Users of whom no part of the model knows anything: own pins that came after training, and no trend."""

from pathlib import Path

import numpy as np

from pf_core.embeddings.checks import judge_active_coverage, judge_embeddings, judge_pin_embeddings
from tests.support.parts_shop import LAST, PartsShop
from tests.support.shop import shop_actions


def test_a_user_of_new_pins_alone_gets_the_best_known_pins(tmp_path: Path) -> None:
    newcomer = [(999, f"new{number}", LAST, 60 * number) for number in range(3)]
    shop = PartsShop(tmp_path, [*shop_actions(), *newcomer])
    served = shop.train(shop.without, trend_dim=0)
    _, users, pins = shop.embed(shop.without, served)
    [user] = [row for row in users if row["user_id"] == 999]
    vector = np.array(user["embedding"], np.float32)
    assert vector.tolist() == [*([0] * (len(vector) - 1)), -1]
    assert sorted(user["memory_pin_id"]) == ["new0", "new1", "new2"]
    assert np.isfinite(user["memory_increment"]).all()
    cosine = {row["pin_id"]: float(vector @ np.array(row["embedding"], np.float32)) for row in pins}
    assert all(-1.001 < each <= 0 for each in cosine.values())
    assert max(cosine[f"new{number}"] for number in range(3)) < min(cosine[pin] for pin in cosine if pin[0] == "p")
    for judge in (judge_embeddings, judge_active_coverage, judge_pin_embeddings):
        assert judge(shop.without, LAST).passed, judge
