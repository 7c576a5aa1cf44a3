"""Writes the site of the fixture `site-*.tar.xz`: everything that the pipeline keeps, built by the code that runs this.

    PYTHONPATH=<a checkout of the version> python tests/upgrade/make_site.py <out.tar.xz>

The fixture of a version is made once, by that version, and then never again: it is what sites in the world have. Paths
of the folder in which it was made are written as ROOT into `site.json`. The logs go one day beyond what is built, so
that a newer version can go on with the next day. The users of the newest release are also in `redis.json`, as they were
in Redis: key to field to value (base64).
"""

import base64
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import redis

from pf_core.config.site import Site
from pf_core.config.training import auto
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.users import embed_days
from pf_core.engine.local import LocalEngine
from pf_core.evaluation.promotion import NamedModel, evaluate_and_decide
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.pins.features import build_pin_features
from pf_core.serving.build_index import build_index_days
from pf_core.serving.publish import publish_release
from pf_core.storage.files import remove_tree, write_json
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.training.plan import code_fingerprint, models_dir, plan_config, write_current_model
from pf_core.training.trainer import train
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support import daily
from tests.support.daily import Rows, day, make_daily_site, write_logs
from tests.support.releases import redis_server
from tests.support.sites import START

LAST_BUILT = day(3)

RELEASED = [day(2), day(3)]

SHORT = {"num_steps": 12, "warmup_steps": 2}


class Silent:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def silent(message: str) -> None:
    pass


def make_site(root: Path) -> Site:
    """Build all assets up to LAST_BUILT, with a model of parts, and two releases."""
    daily.NUM_USERS, daily.NUM_PINS = 48, 40  # a fixture of a few tens of KB
    training = TrainingConfig(evaluation_days=1, held_out_share=0.3)
    site = make_daily_site(root, last=day(4)).model_copy(update={"training": training})
    write_logs(root, ds_range(START, day(4)), poison=(day(1), with_unknown_event))
    (root / "forget.txt").write_text("7\n")
    days, forgotten = ds_range(START, LAST_BUILT), read_deletion_list(site)
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        list(ingest_days(site, days, engine=engine, forgotten=forgotten, progress=silent))
        list(build_pin_features(site, days, engine=engine, progress=silent))
        list(build_timelines(site, days, engine=engine, rebuild=False, progress=silent))
        build_training_set(site, cut_ds=None, engine=engine, progress=silent)
        model = train_model(site)
        evaluate(site, model)
        served = ServedModel(model_version=model.name, path=model.path)
        for ds in RELEASED:
            embedded = embed_days(
                site,
                [ds],
                model_for=lambda ds: served,
                everyone=ds == RELEASED[0],
                engine=engine,
                progress=silent,
            )
            list(embedded)
            list(merge_days(site, [ds], engine=engine, progress=silent))
            list(embed_pin_days(site, [ds], model_for=lambda ds: served, engine=engine, progress=silent))
            list(build_index_days(site, [ds], engine=engine, progress=silent))
            publish_release(site, ds, engine=engine, progress=silent)
        write_json(root / "redis.json", redis_content(site, root / "redis_data", engine))
    for folder in (site.directory, root / "redis_data" / site.name):
        remove_tree(folder / "tmp")
    return site


def with_unknown_event(rows: Rows) -> Rows:
    """The first row goes to quarantine."""
    return rows | {"event": ["dance", *rows["event"][1:]]}


def train_model(site: Site) -> NamedModel:
    """Train a model of parts for a few steps, and make it the current one."""
    path = latest_training_set(site)
    base = auto()
    config = base.model_copy(
        update={
            "optimizer": base.optimizer.model_copy(update=SHORT),
            "batch_users": 16,
            "evaluate_every": 6,
            "parts": base.parts.model_copy(update={"factor_dim": 4}),  # type: ignore[union-attr]
        }
    )
    plan = plan_config(config, path, open_training_set(path).manifest, models_dir(site), code=code_fingerprint())
    train(plan.config, training_set=path, run_dir=plan.run_dir, num_workers=0, observer=Silent())
    for name in ("checkpoints", "prepared"):
        remove_tree(plan.run_dir / name)
    write_current_model(site, plan, mlflow={"experiment_id": "1", "run_id": "1", "version": 1})
    return NamedModel(name=f"{plan.model_version}-1", path=plan.run_dir / "model")


def evaluate(site: Site, model: NamedModel) -> None:
    folder = site.directory / "offline_evaluation"
    folder.mkdir()
    data = open_training_set(latest_training_set(site))
    manifest = evaluate_and_decide(site, data, model, None, scores_path=folder / "scores.parquet", progress=silent)
    write_json(folder / "manifest.json", manifest)


def redis_content(site: Site, data_dir: Path, engine: LocalEngine) -> dict[str, Any]:
    """Publish the newest day in Redis; return what is there. `data_dir` keeps that release's folder."""
    with redis_server() as url:
        store = site.serving.store.model_copy(update={"kind": "redis", "url": url})
        serving = site.serving.model_copy(update={"store": store})
        in_redis = site.model_copy(update={"serving": serving, "data_dir": str(data_dir)})
        shutil.copytree(site.directory, in_redis.directory)
        publish_release(in_redis, LAST_BUILT, engine=engine, progress=silent)
        for folder in in_redis.directory.iterdir():
            if folder.name != "release":
                remove_tree(folder)
        for name in (f"{ds}.1" for ds in RELEASED):
            remove_tree(in_redis.directory / "release" / name)
        with redis.Redis.from_url(url) as client:
            return {key.decode(): content_of(client, key) for key in sorted(client.keys("*"))}


def content_of(client: redis.Redis, key: bytes) -> Any:
    if client.type(key) == b"hash":
        fields = sorted(client.hgetall(key).items())
        return {field.decode(): base64.b64encode(value).decode() for field, value in fields}
    return client.get(key).decode()


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "site"
        site = make_site(root)
        (root / "site.json").write_text(site.model_dump_json().replace(str(root), "ROOT"))
        with tarfile.open(out, "w:xz", preset=9) as archive:
            archive.add(root, arcname="site")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
