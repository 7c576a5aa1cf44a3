"""A site gets content vectors after its model of parts was trained without: the model goes on as before."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pf_core.errors import PipelineError
from pf_core.evaluation.embedders import open_model_embedder
from pf_core.evaluation.question import open_question
from pf_core.model.checkpoint import read_description
from pf_core.pins.features import build_pin_features
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.parts_shop import LAST, PartsShop, silent
from tests.support.shop import VECTOR_DIM


def test_a_model_without_content_goes_on_when_the_site_gets_vectors(tmp_path: Path) -> None:
    shop = PartsShop(tmp_path)
    served = shop.train(shop.without)
    assert not read_description(served.path)["model"]["content"]
    manifest, users, pins = shop.embed(shop.without, served)
    assert manifest["counts"]["users"] == len(users) > 50
    site = shop.add_vectors()
    manifest, users_after, pins_after = shop.embed(site, served)
    assert users_after == users  # with the hashes of what the model reads: nobody had to be embedded again
    assert manifest["counts"]["embedded"] == 0
    assert pins_after == pins

    # It is also evaluated on a training set with vectors, beside the model that reads them.
    newer = shop.train(site)
    assert read_description(newer.path)["model"]["content"]
    data = open_training_set(latest_training_set(site))
    assert data.pin_feature.shape[1] == VECTOR_DIM
    question = open_question(site, data, progress=silent)
    for model in (served, newer):
        embedder = open_model_embedder(question, model.path, name=model.model_version)
        with torch.inference_mode():
            vectors = embedder.pins(np.arange(data.num_pins))
        np.testing.assert_allclose(vectors.norm(dim=1).numpy(), 1, rtol=1e-5)
    shop.embed(site, newer)

    # The other way around it is refused: the model's content part would read nothing.
    list(build_pin_features(shop.without, [LAST], engine=shop.engine, progress=silent))
    with pytest.raises(PipelineError, match=rf"reads pin features of {VECTOR_DIM} numbers, pin_features {LAST} has 0"):
        shop.embed(shop.without, newer)
