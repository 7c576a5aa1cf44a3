"""Tasks travel to other machines as pickles: none may contain a secret of the site file, such as a Redis password.

A publication into Redis is the exception: its tasks write there, so they carry the URL. Everything else runs here, with
the secret in the site.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pf_core.config.serving import ServingConfig
from pf_core.config.training import tiny
from pf_core.config.training_section import TrainingConfig
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.users import embed_days
from pf_core.engine.base import Result, Task
from pf_core.engine.local import LocalEngine
from pf_core.model.checkpoint import save_model
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import build_pin_features
from pf_core.progress import Progress
from pf_core.serving.build_index import build_index_days
from pf_core.training.build_set import build_training_set
from tests.support.sites import START, SmallSite

SECRET = "s3cret-redis-password"
NUM_USERS, NUM_PINS, FEATURE_DIM = 30, 12, 4
STAGES = (
    "raw_actions",
    "raw_actions, shared by machines",
    "user_timelines",
    "training_set",
    "user_embeddings",
    "user_embedding_snapshot",
    "pin_index",
)


class PicklingEngine(LocalEngine):
    """Sends every task through a pickle, as Spark does, and keeps the bytes."""

    def __init__(self, *, temp_dir: Path, spans_machines: bool = False) -> None:
        super().__init__(num_workers=1, memory_mb=64, temp_dir=temp_dir)
        self.spans_machines = spans_machines
        self.sent: list[bytes] = []

    def map_buckets(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress | None = None
    ) -> Iterator[Result]:
        packed = [pickle.dumps((function, task)) for task in tasks]
        self.sent += packed
        yield from super().map_buckets(_unpack_and_run, packed, progress)

    def take_sent(self) -> list[bytes]:
        sent, self.sent = self.sent, []
        return sent


def _unpack_and_run(packed: bytes) -> Any:
    function, task = pickle.loads(packed)
    return function(task)


def quiet(message: str) -> None:
    pass


def make_site(root: Path) -> SmallSite:
    root.mkdir()
    small = SmallSite(root)
    serving = {"store": {"url": f"redis://:{SECRET}@host:6379/0"}, "index": {"sample_users": 5}}
    training = {"preset": "tiny", "evaluation_days": 0}
    small.site = small.site.model_copy(
        update={
            "serving": ServingConfig.model_validate(serving),
            "training": TrainingConfig.model_validate(training),
        }
    )
    small.write_log(
        START, [(user, f"p{(user + n) % NUM_PINS}", 60 * n, "look") for user in range(NUM_USERS) for n in range(4)]
    )
    (root / "pins").mkdir()
    vectors = np.random.default_rng(0).normal(size=(NUM_PINS, FEATURE_DIM)).tolist()
    pins = {"pin": [f"p{number}" for number in range(NUM_PINS)], "vector": pa.array(vectors, pa.list_(pa.float32()))}
    pq.write_table(pa.table(pins), root / "pins" / f"{START}.parquet")
    return small


def make_model(folder: Path) -> ServedModel:
    torch.manual_seed(0)
    words = {"action_types": ["click", "closeup", "repin"], "surfaces": ["homefeed", "search"]}
    model = PinnerFormer(tiny().model, feature_dim=FEATURE_DIM, num_action_types=3, num_surfaces=2, time_origin_us=0)
    save_model(folder, model, words | {"feature_dim": FEATURE_DIM, "feature_scale": 1.0, "time_origin_us": 0})
    return ServedModel(model_version="m", path=folder)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """The pickled tasks of each stage of the daily path and of the training set, for one day."""
    root, sent = tmp_path_factory.mktemp("secrets"), {}
    shared = make_site(root / "shared")
    engine = PicklingEngine(temp_dir=root / "tmp", spans_machines=True)
    shared.engine = engine
    shared.ingest([START])
    sent["raw_actions, shared by machines"] = engine.take_sent()
    small = make_site(root / "alone")
    engine = PicklingEngine(temp_dir=root / "tmp")
    small.engine = engine
    site, served = small.site, make_model(root / "model")
    small.ingest([START])
    sent["raw_actions"] = engine.take_sent()
    list(build_pin_features(site, [START], engine=engine, progress=quiet))
    engine.take_sent()
    small.build([START])
    sent["user_timelines"] = engine.take_sent()
    build_training_set(site, cut_ds=START, engine=engine, progress=quiet)
    sent["training_set"] = engine.take_sent()
    options: dict[str, Any] = {"engine": engine, "progress": quiet}
    list(embed_days(site, [START], model_for=lambda ds: served, everyone=True, **options))
    sent["user_embeddings"] = engine.take_sent()
    list(merge_days(site, [START], **options))
    sent["user_embedding_snapshot"] = engine.take_sent()
    list(embed_pin_days(site, [START], model_for=lambda ds: served, **options))
    engine.take_sent()
    list(build_index_days(site, [START], **options))
    sent["pin_index"] = engine.take_sent()
    return sent


@pytest.mark.parametrize("stage", STAGES)
def test_no_task_carries_a_secret_of_the_site_file(stage: str, sent: dict[str, list[bytes]]) -> None:
    assert sent[stage]
    assert not [packed for packed in sent[stage] if SECRET.encode() in packed]


def test_a_secret_would_be_found(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site").site
    engine = PicklingEngine(temp_dir=tmp_path)
    assert list(engine.map_buckets(type, [site])) == [type(site)]
    assert SECRET.encode() in engine.take_sent()[0]
