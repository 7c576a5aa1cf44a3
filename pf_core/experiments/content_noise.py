"""Training sets with noisy content vectors: how good do content vectors have to be? (an experiment of ours)

A noisy set has the timelines, pins and vocabularies of its base set (the files are hard links), and content vectors to
which isotropic noise of `noise` times their norm was added, rescaled to their original norm. It is a function of the
base set and of `noise`: its fingerprint is known before it exists.
"""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np

from pf_core.storage.cache import fetched
from pf_core.storage.files import write_json
from pf_core.storage.locks import exclusive
from pf_core.training.training_set import DESCRIPTION, TrainingSetManifest

FEATURE = Path("pins", "feature.npy")

SEED = 0xC0

CHUNK_ROWS = 65_536


def noisy_manifest(manifest: TrainingSetManifest, noise: float) -> TrainingSetManifest:
    """Return the manifest of the noisy set, from the manifest of its base set."""
    content = f"{manifest['fingerprint']} content_noise={noise:g}"
    return manifest | {"fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16], "content_noise": noise}


def make_noisy_set(base: Path, manifest: TrainingSetManifest, target: Path) -> None:
    """Build the set that `manifest` describes from the one in `base`; other sets in the target's parent are removed."""
    with exclusive(target.parent, target.parent.name):
        if (target / DESCRIPTION).exists():
            return
        for other in target.parent.glob("*/"):
            shutil.rmtree(other)
        base = fetched(base)
        for path in base.rglob("*"):
            linked = target / path.relative_to(base)
            if path.is_file() and linked != target / FEATURE and linked != target / DESCRIPTION:
                linked.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, linked)
        _write_features(base / FEATURE, target / FEATURE, noise=float(manifest["content_noise"]))
        write_json(target / DESCRIPTION, manifest)


def _write_features(source: Path, target: Path, *, noise: float) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_ND = np.load(source, mmap_mode="r")
    noisy_ND = np.lib.format.open_memmap(target, mode="w+", dtype=clean_ND.dtype, shape=clean_ND.shape)
    for start in range(0, len(clean_ND), CHUNK_ROWS):
        chunk_CD = clean_ND[start : start + CHUNK_ROWS]
        noise_CD = np.random.default_rng([SEED, start]).standard_normal(chunk_CD.shape, np.float32)
        norm_C1 = np.linalg.norm(chunk_CD, axis=1, keepdims=True)
        mixed_CD = chunk_CD + noise * norm_C1 * noise_CD / chunk_CD.shape[1] ** 0.5
        length_C1 = np.linalg.norm(mixed_CD, axis=1, keepdims=True)
        noisy_ND[start : start + CHUNK_ROWS] = mixed_CD * (norm_C1 / np.maximum(length_C1, np.finfo(np.float32).tiny))
    noisy_ND.flush()
