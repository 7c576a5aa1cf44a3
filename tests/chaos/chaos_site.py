"""The site that runs are killed on: five days of logs, two models, and its content as digests that can be compared."""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.config.training_section import LaunchConfig, TrainingConfig
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.engine.daily_state import DailyState
from pf_core.logs.partition import bucket_files, ingested_days, read_quarantine, require_manifest
from pf_core.pins.features import pin_state
from pf_core.serving.client import Serving
from pf_core.serving.index import PinIndex, index_days, require_index
from pf_core.serving.releases import list_releases, read_published
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import find_json
from pf_core.timelines.build import stored_timelines, timeline_state
from pf_core.training.plan import models_dir
from pf_core.training.refit import refits_dir
from pf_core.training.training_set import latest_training_set, read_training_set_manifest, training_sets_dir
from tests.support.daily import NUM_USERS, Rows, make_daily_site, write_logs, write_model
from tests.support.sites import START

DAYS = ds_range(START, shift_ds(START, 4))
AGAIN, NEXT = DAYS[3], DAYS[4]
"""The newest day that the site has, which is built again from another log, and the day after it."""

SITE_FILE = "site.yaml"

MODELS = {"A": "model0000000-1", "B": "model0000001-2"}
"""Served version of each model."""

STEPS = {
    "optimizer": {"num_steps": 6, "warmup_steps": 2},
    "log_every": 2,
    "evaluate_every": 3,
    "checkpoint_every": 2,
}


# The site


def make_site(root: Path) -> Site:
    """Write logs, catalogue and models; nothing is materialized."""
    site = make_daily_site(root, last=DAYS[-1])
    launch = LaunchConfig(num_workers=0)
    training = TrainingConfig(preset="tiny", changes=STEPS, held_out_share=0.3, evaluation_days=1, launch=launch)
    site = site.model_copy(update={"training": training})
    for seed in range(len(MODELS)):
        write_model(site, seed)
    (root / SITE_FILE).write_text(site.model_dump_json())
    return site


def open_site(root: Path) -> Site:
    """Open the site in a folder, which may be a copy of the one where it was made."""
    site = Site.model_validate_json((root / SITE_FILE).read_text())
    made_in = str(Path(site.data_dir).parent)
    return Site.model_validate_json(site.model_dump_json().replace(made_in, str(root)))


def served(site: Site, model: str) -> ServedModel:
    version = MODELS[model]
    return ServedModel(model_version=version, path=models_dir(site) / version.split("-")[0] / "model")


def change_log(root: Path, variant: int) -> None:
    """Replace, at once, the file of the day AGAIN: in variant 1, half of its own rows are about other pins."""

    def changed(rows: Rows) -> Rows:
        is_own = [time_us >= ds_start_us(AGAIN) for time_us in rows["time_us"]]
        pins = [
            f"p{(int(pin[1:]) + 4) % 80}" if own and number % 2 and variant else pin
            for number, (pin, own) in enumerate(zip(rows["pin"], is_own, strict=True))
        ]
        return {**rows, "pin": pins}

    aside = root / "aside" / uuid.uuid4().hex  # several processes may do this at once
    write_logs(aside, DAYS, poison=(AGAIN, changed))
    os.replace(aside / "logs" / f"{AGAIN}.parquet", root / "logs" / f"{AGAIN}.parquet")


# Its content


def content_of(root: Path) -> dict[str, str]:
    """Return a digest of everything that a reader of the site can see, by asset and day.

    What is not there has no entry. What cannot be read as a whole is an error.
    """
    site = open_site(root)
    readers: dict[str, Callable[[Site], Iterator[tuple[str, Any]]]] = {
        "raw_actions": _raw_actions,
        "pin_features": _pin_features,
        "user_timelines": _timelines,
        "training_set": _training_set,
        "pinnerformer_model": _model,
        "offline_evaluation": _evaluation,
        "refitted_model": _refit,
        "user_embeddings": lambda site: _rows(embedding_state(site)),
        "user_embedding_snapshot": lambda site: _rows(snapshot_state(site)),
        "pin_embeddings": lambda site: _rows(pin_embedding_state(site)),
        "pin_index": _indexes,
        "release": release_content,
        "export": _exports,
    }
    return {
        f"{asset} {name}".strip(): digest_of(value) for asset, reader in readers.items() for name, value in reader(site)
    }


def digest_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _raw_actions(site: Site) -> Iterator[tuple[str, Any]]:
    for ds in ingested_days(site):
        files = bucket_files(site, ds)
        rows = [pq.read_table(files[bucket]).to_pylist() for bucket in sorted(files)]
        yield ds, (rows, require_manifest(site, ds)["counts"], read_quarantine(site, ds).to_pylist())


def _pin_features(site: Site) -> Iterator[tuple[str, Any]]:
    state = pin_state(site)
    for ds in state.days():
        with state.held(ds) as day:
            yield ds, sorted_rows(day.open_bucket(0).to_table(), "pin_id")


def _timelines(site: Site) -> Iterator[tuple[str, Any]]:
    state = timeline_state(site)
    for ds in state.days():
        with state.held(ds) as day:
            buckets = [stored_timelines(day, bucket).read().to_pylist() for bucket in range(state.num_buckets)]
            yield ds, (buckets, day.manifest["raw_digests"], day.manifest["counts"])


def _rows(state: "DailyState[Any]") -> Iterator[tuple[str, Any]]:
    key = "pin_id" if state.asset == "pin_embeddings" else "user_id"
    for ds in state.days():
        with state.held(ds) as day:
            tables = [sorted_rows(dataset.to_table(), key) for dataset in day.buckets()]
            assert_one_model(tables, day.manifest["model_version"], f"{state.asset} {ds}")
            yield ds, (tables, day.manifest["model_version"], day.manifest["digest"])


def assert_one_model(tables: list[list[dict[str, Any]]], model_version: str, what: str) -> None:
    found = {row["model_version"] for rows in tables for row in rows}
    assert found <= {model_version}, f"{what} is of {model_version} and has rows of {found}"


def sorted_rows(table: pa.Table, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.sort_by(key).to_pylist()
    return rows


def _training_set(site: Site) -> Iterator[tuple[str, Any]]:
    if (training_sets_dir(site) / MANIFEST).exists():
        folder = latest_training_set(site)
        manifest = read_training_set_manifest(folder)
        for name, sha256 in manifest["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256, name
        yield "", manifest["fingerprint"]


def _model(site: Site) -> Iterator[tuple[str, Any]]:
    manifest = find_json(models_dir(site) / MANIFEST)
    if manifest is not None:
        yield "", _files_of_model(models_dir(site) / manifest["model_version"])


def _refit(site: Site) -> Iterator[tuple[str, Any]]:
    manifest = find_json(refits_dir(site) / MANIFEST)
    if manifest is not None:
        yield "", _files_of_model(refits_dir(site) / manifest["refit_of"] / manifest["model_version"])


def _files_of_model(run_dir: Path) -> Any:
    steps = [json.loads(line)["step"] for line in (run_dir / "history.jsonl").read_text().splitlines()]
    files = sorted(path for path in (run_dir / "model").rglob("*") if path.is_file())
    return run_dir.name, steps, [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def _evaluation(site: Site) -> Iterator[tuple[str, Any]]:
    manifest = find_json(site.directory / "offline_evaluation" / MANIFEST)
    if manifest is not None:
        yield "", {name: value for name, value in sorted(manifest.items()) if name != "seconds"}


def _indexes(site: Site) -> Iterator[tuple[str, Any]]:
    for ds in index_days(site):
        manifest, folder = require_index(site, ds)
        index = PinIndex.open(folder)
        vectors = index.vectors(np.arange(len(index)))
        assert index.description["vectors_of"] == [manifest["model_version"]]
        yield ds, (manifest["model_version"], index.pin_ids.to_pylist(), vectors.tobytes(), manifest["ef"])


def release_content(site: Site) -> Iterator[tuple[str, Any]]:
    """Everything that a service can read of the current release, and which releases there are."""
    if read_published(site).current is None:
        return
    release = Serving(site).release()
    found = release.look_up(list(range(NUM_USERS)))
    assert int(found.found_N.sum()) == release.manifest["counts"]["users"]
    users = [None if value is None else bytes(value) for value in found.values]
    index = release.index
    assert isinstance(index, PinIndex)
    vectors = index.vectors(np.arange(len(index)))
    known = int(np.flatnonzero(found.found_N)[0])
    yield "", (release.manifest["model_version"], release.manifest["ds"], users, vectors.tobytes())
    yield "hits", (release.recommend(known, k=5), release.popular(k=5))
    # Not their ids: a publication that was killed uses up a number.
    yield "list", [(one["ds"], one["is_current"], one["is_withdrawn"]) for one in list_releases(site)]


def _exports(site: Site) -> Iterator[tuple[str, Any]]:
    for folder in sorted(Path(site.data_dir).parent.glob("export-*")):
        yield folder.name, sorted_rows(pq.read_table(folder), folder.name.removeprefix("export-")[:-1] + "_id")
