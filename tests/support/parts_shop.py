"""A shop through the pipeline in this process: timelines and pins, a model of parts, records of users and pins."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pf_core.benchmark.stages import ingest_log
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.tables import embedding_state, pin_embedding_state
from pf_core.embeddings.users import embed_days
from pf_core.engine.local import LocalEngine
from pf_core.pins.features import build_pin_features
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.training.plan import plan_model
from pf_core.training.trainer import train
from tests.support.shop import CUT_DS, DAYS, Row, without_vectors, write_shop

LAST = DAYS[-1]


class Silent:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def silent(message: str) -> None:
    pass


class PartsShop:
    """The site file has no vectors at first; the matrix is there all the time."""

    def __init__(self, root: Path, rows: Sequence[Row] | None = None) -> None:
        self.with_vectors = write_shop(root, rows)
        self.without = Site.model_validate(self.with_vectors.model_dump(mode="json") | without_vectors(root))
        self.engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=root / "tmp")
        ingest_log(self.without, engine=self.engine, progress=silent)
        days: Any = {"engine": self.engine, "progress": silent}
        list(build_timelines(self.without, ds_range(CUT_DS, LAST), rebuild=True, **days))
        list(build_pin_features(self.without, ds_range(CUT_DS, LAST), **days))

    def train(self, site: Site, **parts: Any) -> ServedModel:
        build_training_set(site, cut_ds=CUT_DS, engine=self.engine, progress=silent)
        plan = plan_model(site, "auto", {"optimizer": {"num_steps": 2}, "batch_users": 32, "parts": parts})
        train(plan.config, training_set=plan.training_set, run_dir=plan.run_dir, num_workers=0, observer=Silent())
        return ServedModel(model_version=plan.model_version, path=plan.run_dir / "model")

    def add_vectors(self) -> Site:
        list(build_pin_features(self.with_vectors, ds_range(CUT_DS, LAST), engine=self.engine, progress=silent))
        return self.with_vectors

    def embed(self, site: Site, served: ServedModel) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """The manifest of the users, and the rows of users and pins."""
        [users] = embed_days(
            site,
            [LAST],
            model_for=lambda ds: served,
            everyone=True,
            engine=self.engine,
            progress=silent,
        )
        list(embed_pin_days(site, [LAST], model_for=lambda ds: served, engine=self.engine, progress=silent))
        users_of = [embedding_state(site).open_bucket(LAST, bucket) for bucket in range(2)]
        rows = [row for dataset in users_of for row in dataset.to_table().to_pylist()]
        return dict(users), rows, pin_embedding_state(site).open_bucket(LAST, 0).to_table().to_pylist()
