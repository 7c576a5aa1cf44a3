"""A training set with noisy content vectors is the same set with other vectors, made once."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from pf_core.config.site import Site
from pf_core.experiments.content_noise import FEATURE, make_noisy_set, noisy_manifest
from pf_core.storage.files import read_json, write_json
from pf_core.training.training_set import DESCRIPTION, TrainingSetManifest, latest_training_set, open_training_set
from tests.support.shared import SharedSites
from tests.support.tiny_world import make_tiny_site


@pytest.fixture(scope="module")
def site(shared_sites: SharedSites, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_sites.copy("tiny-world", make_tiny_site, tmp_path_factory.mktemp("tiny"))


def make(site: Site, noise: float, folder: Path) -> Path:
    base = latest_training_set(site)
    manifest = noisy_manifest(read_json(base / DESCRIPTION), noise)
    make_noisy_set(base, manifest, folder / manifest["fingerprint"])
    return folder / manifest["fingerprint"]


def test_only_the_vectors_are_others(site: Site, tmp_path: Path) -> None:
    clean = open_training_set(latest_training_set(site))
    noisy = open_training_set(make(site, 2.0, tmp_path))
    assert noisy.fingerprint != clean.fingerprint
    assert noisy.manifest["content_noise"] == 2.0
    for name in ("pin", "ts", "offsets", "is_positive"):
        np.testing.assert_array_equal(getattr(noisy.train, name), getattr(clean.train, name))
    assert noisy.held_out.user_ids() == clean.held_out.user_ids()
    np.testing.assert_array_equal(noisy.interests(), clean.interests())
    written = {path.relative_to(noisy.path) for path in noisy.path.rglob("*")}
    assert written == {path.relative_to(clean.path) for path in clean.path.rglob("*")}


def test_the_noise_is_as_large_as_it_says(tmp_path: Path) -> None:
    """f + n·|f|·g has, in many dimensions, the length |f|·√(1 + n²), so that its cosine with f is 1 / √(1 + n²)."""
    rng, base = np.random.default_rng(0), tmp_path / "base"
    clean = (rng.standard_normal((300, 2048)) * rng.uniform(0.1, 9, (300, 1))).astype(np.float32)
    (base / "pins").mkdir(parents=True)
    np.save(base / FEATURE, clean)
    write_json(base / DESCRIPTION, {"fingerprint": "f"})
    for noise in (1.0, 3.0):
        manifest = noisy_manifest(cast("TrainingSetManifest", {"fingerprint": "f"}), noise)
        make_noisy_set(base, manifest, tmp_path / f"{noise}" / "set")
        noisy = np.load(tmp_path / f"{noise}" / "set" / FEATURE)
        length = np.linalg.norm(clean, axis=1)
        np.testing.assert_allclose(np.linalg.norm(noisy, axis=1), length, rtol=1e-5)
        cosine = (noisy * clean).sum(1) / length**2
        np.testing.assert_allclose(cosine.mean(), 1 / (1 + noise**2) ** 0.5, rtol=0.01)


def test_a_vector_of_zeros_stays_one(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "pins").mkdir(parents=True)
    np.save(base / FEATURE, np.zeros((3, 4), np.float32))
    make_noisy_set(
        base, noisy_manifest(cast("TrainingSetManifest", {"fingerprint": "f"}), 1.0), tmp_path / "noisy" / "set"
    )
    np.testing.assert_array_equal(np.load(tmp_path / "noisy" / "set" / FEATURE), np.zeros((3, 4)))


def test_it_is_made_once_and_the_same_again(site: Site, tmp_path: Path) -> None:
    first = make(site, 1.0, tmp_path / "one")
    written = (first / FEATURE).stat().st_mtime_ns
    assert make(site, 1.0, tmp_path / "one") == first
    assert (first / FEATURE).stat().st_mtime_ns == written
    again = make(site, 1.0, tmp_path / "another")
    assert (again / FEATURE).read_bytes() == (first / FEATURE).read_bytes()


def test_what_was_interrupted_or_is_of_another_set_goes(site: Site, tmp_path: Path) -> None:
    path = make(site, 1.0, tmp_path)
    (path / DESCRIPTION).unlink()
    (tmp_path / "older").mkdir()
    assert make(site, 1.0, tmp_path) == path
    open_training_set(path)
    assert [other.name for other in tmp_path.iterdir() if other.is_dir()] == [path.name]
