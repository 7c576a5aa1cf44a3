"""The training of a model of parts: it learns, resumes exactly, and ranks do not change the result."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pf_core.config.training import TrainConfig, auto, change_auto
from pf_core.errors import PipelineError
from pf_core.model.checkpoint import load_parts
from pf_core.model.parts.inference import KnownPins, embed_records
from pf_core.model.parts.inputs import unit_rows
from pf_core.pins.lookup import find_pins
from pf_core.storage.arrays import read_arrow
from pf_core.training.parts import prepared as prepared_module
from pf_core.training.parts.factors import fit_factors
from pf_core.training.refit import read_judged
from pf_core.training.trainer import train
from pf_core.training.training_set import open_training_set
from tests.support.parts import complete_parts_set, random_timelines, write_parts_set
from tests.support.planted import NUM_INTERESTS, PINS_PER_INTEREST, write_planted_set

REPOSITORY = Path(__file__).parents[3]

RANK_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from pf_core.config.training import TrainConfig
from pf_core.training.trainer import train
torch.set_num_threads(1)
class Observer:
    def say(self, message): print(message, flush=True)
    def measure(self, step, values): pass
if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    train(TrainConfig.model_validate(job["config"]), training_set=Path(job["training_set"]),
          run_dir=Path(job["run_dir"]), num_workers=0, observer=Observer())
"""


class Notes:
    def __init__(self, *, stop_at: int | None = None) -> None:
        self.stop_at, self.said = stop_at, list[str]()

    def say(self, message: str) -> None:
        self.said.append(message)

    def measure(self, step: int, values: dict[str, float]) -> None:
        if step == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_parts_set(write_planted_set(tmp_path_factory.mktemp("planted") / "set"))


def config_of(*, steps: int = 20, **changes: Any) -> TrainConfig:
    parts = {"factor_dim": 8, "trend_dim": 4, "points_in_time": 2} | changes.pop("parts", {})
    small = {"batch_users": 48, "log_every": 5, "evaluate_every": 5, "checkpoint_every": 5}
    return change_auto(auto(), small | {"optimizer": {"num_steps": steps}, "parts": parts} | changes)


def run(
    planted: Path, run_dir: Path, config: TrainConfig, observer: Notes | None = None, **options: Path
) -> dict[str, torch.Tensor]:
    train(config, training_set=planted, run_dir=run_dir, num_workers=0, observer=observer or Notes(), **options)
    return load_file(run_dir / "model" / "model.safetensors")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def history(run_dir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_a_user_retrieves_their_planted_interest(planted: Path, tmp_path: Path) -> None:
    """Held-out users; without content vectors' help from the pool, since factors alone know the interests."""
    run(planted, tmp_path, config_of(steps=60, parts={"content": False}))
    model, table, _ = load_parts(tmp_path / "model")
    data = open_training_set(planted)
    ids = read_arrow(planted / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    known = KnownPins(
        model=model,
        table=table,
        table_row=find_pins(table.ids, ids),
        content=lambda pin_M: np.zeros((len(pin_M), 0), np.float32),
    )
    users = data.held_out
    records = embed_records(known, users, users.offsets[:-1], users.offsets[1:])
    cosine_BN = records.vector_BV @ table.vector.astype(np.float32).T
    best_BK = np.argsort(-cosine_BN, axis=1)[:, :PINS_PER_INTEREST]
    interest_B = users.pin[users.offsets[:-1]] % NUM_INTERESTS
    assert (best_BK % NUM_INTERESTS == interest_B[:, None]).mean() > 0.8
    losses = history(tmp_path, "loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "parts",
    [{}, {"memory": False}, {"full_softmax_pins": 50, "num_negatives": 40}, {"transformer_layers": 1}],
    ids=["memory", "no memory", "sampled", "transformer"],
)
def test_a_resumed_run_gives_the_same_bytes(planted: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    config = config_of(parts=parts)
    run(planted, tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        run(planted, tmp_path / "parts", config, Notes(stop_at=10))
    assert not (tmp_path / "parts" / "result.json").exists()
    assert (tmp_path / "parts" / "prepared" / "prepared.json").is_file()
    notes = Notes()
    run(planted, tmp_path / "parts", config, notes)
    assert "resuming after step 5" in notes.said
    assert files_of(tmp_path / "whole" / "model") == files_of(tmp_path / "parts" / "model")
    for folder in ("whole", "parts"):  # a finished training has no use for it
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [
            "checkpoints",
            "history.jsonl",
            "model",
            "result.json",
        ]
    for name in ("loss", "validation_loss", "recall_at_10", "best_step"):
        assert history(tmp_path / "parts", name) == history(tmp_path / "whole", name), name


def test_an_interrupted_preparation_is_repeated(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(steps=3)
    run(planted, tmp_path / "whole", config, prepared=tmp_path / "whole" / "shared")
    original, calls = fit_factors, list[int]()

    def stop_at_the_second(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(prepared_module, "fit_factors", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(planted, tmp_path / "again", config, prepared=tmp_path / "again" / "shared")
    run(planted, tmp_path / "again", config, prepared=tmp_path / "again" / "shared")
    for folder in ("shared", "model"):  # a shared folder stays
        assert files_of(tmp_path / "whole" / folder) == files_of(tmp_path / "again" / folder)


def test_an_interrupted_end_is_repeated(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped while it removes what it prepared: it prepares once more, and gives the same model."""
    config = config_of(steps=3)
    run(planted, tmp_path / "whole", config)

    def remove_some(folder: Path) -> None:
        (folder / "factors-00" / "factor_ND.npy").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepared_module, "remove_tree", remove_some)
        with pytest.raises(KeyboardInterrupt):
            run(planted, tmp_path / "again", config)
    assert not (tmp_path / "again" / "result.json").exists()
    run(planted, tmp_path / "again", config)
    assert files_of(tmp_path / "whole" / "model") == files_of(tmp_path / "again" / "model")
    assert not (tmp_path / "again" / "prepared").exists()


def test_a_log_of_few_users_is_trained_or_refused_with_the_reason(tmp_path: Path) -> None:
    """Six users, all of whom would be validation users: they train. Three cannot fill a row's day."""
    for num_users in (6, 3):
        timelines = random_timelines([30] * num_users, num_pins=20)
        write_parts_set(tmp_path / f"{num_users}", timelines, num_pins=20, num_days=40)
    config = config_of(steps=3, parts={"validation_share": 0.9, "window_days": 5})
    run(tmp_path / "6", tmp_path / "run-6", config)
    assert history(tmp_path / "run-6", "loss")
    reason = (
        "no day has 4 training users with an action before it and a positive one .* in the 5 days after it; add days"
    )
    with pytest.raises(PipelineError, match=f"not a single pair in the 3 steps up to 3: {reason}"):
        run(tmp_path / "3", tmp_path / "run-3", config)


def test_the_best_weights_are_saved_not_the_last(planted: Path, tmp_path: Path) -> None:
    """The loss of the validation users chooses the step; another seed gives other weights."""
    weights = run(planted, tmp_path / "one", config_of())
    losses, best = history(tmp_path / "one", "validation_loss"), history(tmp_path / "one", "best_step")
    assert best == [5 * (1 + int(np.argmin(losses[: 1 + number]))) for number in range(len(losses))]
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert result["metrics"]["chosen_steps"] == best[-1] == result["chosen_steps"]
    assert read_judged(tmp_path / "one" / "model", served_version="abc-1", version=1).num_steps == best[-1]
    checkpoint = load_file(sorted((tmp_path / "one" / "checkpoints").iterdir())[-1] / "weights.safetensors")
    assert torch.equal(weights["trend.weight"], checkpoint["best_trend__weight"])
    other = run(planted, tmp_path / "other", config_of(seed=1))
    assert not torch.equal(weights["trend.pin_mlp.2.weight"], other["trend.pin_mlp.2.weight"])


def test_the_saved_table_is_that_of_the_end_of_training(planted: Path, tmp_path: Path) -> None:
    run(planted, tmp_path, config_of(steps=5))
    model, table, description = load_parts(tmp_path / "model")
    data = open_training_set(planted)
    assert description["family"] == "parts"
    assert len(table.trust) == data.num_pins
    norm = np.linalg.norm(table.vector.astype(np.float64), axis=1)
    np.testing.assert_allclose(norm, 1, atol=2e-3)
    assert table.vector[:, -1].min() > 0  # the slack: no pin is clipped
    assert float(model.pin_length) > 0
    content = unit_rows(np.asarray(data.pin_feature[:3], np.float32))
    np.testing.assert_allclose(np.linalg.norm(content, axis=1), 1, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{}, {"memory": False}], ids=["memory", "no memory"])
def test_two_ranks_give_what_one_process_gives(planted: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    config = config_of(steps=10, parts=parts)
    one = run(planted, tmp_path / "one", config)
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "rank.py").write_text(RANK_SCRIPT)
    job = {"training_set": str(planted), "run_dir": str(folder), "config": config.model_dump(mode="json")}
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(folder / "rank.py"), str(folder / "job.json")]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    two = load_file(folder / "model" / "model.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: name + text)
    assert history(folder, "loss") == pytest.approx(history(tmp_path / "one", "loss"), rel=1e-4)
    np.testing.assert_array_equal(
        np.load(folder / "model/pin_table/factor.npy"), np.load(tmp_path / "one/model/pin_table/factor.npy")
    )
