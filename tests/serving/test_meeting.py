"""Runs that meet at the end of the pipeline: an index, a release and an export are of one model and of one day."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pf_core.config.site import Site
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.serving import build_index
from pf_core.serving.build_index import build_index_days
from pf_core.serving.export import export_embeddings
from pf_core.serving.index import DESCRIPTION, IndexManifest, PinIndex, index_manifest, require_index
from pf_core.storage.files import read_json, write_json
from tests.support.releases import (
    NUM_PINS,
    make_site,
    model_of,
    publish,
    silent,
    vector_of,
    write_day,
    write_index,
    write_pins,
    write_snapshot,
)

DS = "2026-01-01"
USERS = list(range(60))


def build(site: Site, progress: Callable[[str], None] = silent) -> IndexManifest:
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        [manifest] = build_index_days(site, [DS], engine=engine, progress=progress)
    return manifest


def vectors_of(folder: Path) -> np.ndarray:
    return PinIndex.open(folder).vectors(np.arange(NUM_PINS))


def expected(version: int) -> np.ndarray:
    return np.array([vector_of(f"pin{number:02d}", version) for number in range(NUM_PINS)], np.float32)


def drop_older_versions(site: Site) -> None:
    """What the next run of the two assets does."""
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        for state in (pin_embedding_state(site), snapshot_state(site)):
            if state.days():
                state.retain(30, engine, silent)


def test_an_index_is_of_the_pins_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The day is embedded again by another model while its index is built."""
    site = make_site(tmp_path)
    write_snapshot(site, DS, USERS, version=1)
    write_pins(site, DS, version=1)
    share = build_index._share_graph

    def meddle(*arguments: Any) -> Any:  # the manifest is read, no vector yet
        write_snapshot(site, DS, USERS, version=2)
        write_pins(site, DS, version=2)
        drop_older_versions(site)
        return share(*arguments)

    monkeypatch.setattr(build_index, "_share_graph", meddle)
    manifest = build(site)
    monkeypatch.undo()
    assert (manifest["model_version"], manifest["vectors_of"]) == (model_of(1), [model_of(1)])
    assert manifest["recall_at_10"] >= 0.99
    assert np.array_equal(vectors_of(require_index(site, DS)[1]), expected(1))
    with pytest.raises(PipelineError, match=r"is of model model-2, pin_index 2026-01-01 of model model-1: a rele"):
        publish(site, DS)
    again = build(site)
    assert again["vectors_of"] == [model_of(2)]
    assert np.array_equal(vectors_of(require_index(site, DS)[1]), expected(2))
    assert publish(site, DS)["model_version"] == model_of(2)


def test_vectors_that_say_that_another_model_made_them_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    write_snapshot(site, DS, USERS, version=1)
    write_pins(site, DS, version=2)
    state = pin_embedding_state(site)
    content = {**state.require(DS), "model_version": model_of(1)}
    state.publish(DS, content["versions"], content)
    with pytest.raises(
        PipelineError, match=r"is of model model-1, but has vectors of model-2; no index was published; embed the pins"
    ):
        build(site)
    assert index_manifest(site, DS) is None


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([model_of(2)], r"has model model-1 with 8 dimensions and vectors of model-2, the users model model-1 with 8"),
        ([model_of(1), model_of(2)], "and vectors of model-1, model-2, the users model"),
        (None, r"built by an older version, which did not record the models .*rebuild it with: .*--select pin_index"),
    ],
)
def test_a_release_verifies_the_vectors_of_its_index(tmp_path: Path, vectors: list[str] | None, message: str) -> None:
    site = make_site(tmp_path)
    write_day(site, DS, USERS, version=1)
    manifest, folder = require_index(site, DS)
    changed = {name: value for name, value in manifest.items() if name != "vectors_of"}
    changed |= {} if vectors is None else {"vectors_of": vectors}
    for path in (folder / DESCRIPTION, folder.parent / "manifest.json"):
        write_json(path, {**read_json(path), **changed} if vectors is not None else changed)
    with pytest.raises(PipelineError, match=message):
        publish(site, DS)
    assert not (site.directory / "release" / "current.json").exists()
    if vectors is None:  # an index of an older version is built again, although its inputs are the same
        assert build(site)["vectors_of"] == [model_of(1)]
        publish(site, DS)


def test_an_export_is_of_one_version_of_the_day(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    write_snapshot(site, DS, USERS, version=1)

    def meddle(message: str) -> None:
        write_snapshot(site, DS, USERS, version=2)
        drop_older_versions(site)

    assert export_embeddings(site, "users", tmp_path / "out", ds=DS, progress=meddle) == len(USERS)
    rows = pq.read_table(tmp_path / "out")
    assert set(rows["model_version"].to_pylist()) == {model_of(1)}
    for user, vector in zip(rows["user_id"].to_pylist(), rows["embedding"].to_pylist(), strict=True):
        assert np.array_equal(vector, vector_of(user, 1))


def test_nobody_replaces_what_a_release_is_made_of(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    write_day(site, DS, USERS, version=1)
    refusals: list[str] = []

    def meddle(message: str) -> None:
        with pytest.raises(PipelineError, match="another run is writing user_embedding_snapshot or relying on it"):
            snapshot_state(site).writing().__enter__()
        with pytest.raises(PipelineError, match="another run is writing pin_index or relying on it"):
            write_index(site, DS, version=2)
        refusals.append(message)

    assert publish(site, DS, progress=meddle)["model_version"] == model_of(1)
    assert refusals
