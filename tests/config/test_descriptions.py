"""Every key of the site file has a description, and describing keys changes no fingerprint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from pf_core.config.base import Strict
from pf_core.config.site import EngineConfig, Site, load_site
from pf_core.config.training import TrainConfig, demo, paper, tiny

REPOSITORY = Path(__file__).parents[2]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that a type mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def models_below(model: type[BaseModel]) -> set[type[BaseModel]]:
    found, queue = set(), [model]
    while queue:
        current = queue.pop()
        if current not in found:
            found.add(current)
            queue += [inner for field in current.model_fields.values() for inner in models_in(field.annotation)]
    return found


MODELS = models_below(Site) | models_below(TrainConfig)
BY_NAME = {model.__name__: model for model in MODELS}


def test_all_configuration_models_are_found() -> None:
    def subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
        return {model}.union(*(subclasses(inner) for inner in model.__subclasses__()))

    ours = {model for model in subclasses(Strict) if model.__module__.startswith("pf_core.config.")}
    assert ours - {Strict} == MODELS


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_key_has_a_description(name: str) -> None:
    model = BY_NAME[name]
    assert model.__doc__
    for key, field in model.model_fields.items():
        description = field.description or ""
        assert description.endswith("."), f"{name}.{key}: {description!r} is no sentence"
        assert len(description.split()) >= 2, f"{name}.{key}: {description!r} names no subject"
        assert not description.startswith(("Of ", "The same")), f"{name}.{key}: {description!r}"


def test_a_key_without_a_description_is_found() -> None:
    class Undescribed(Strict):
        key: int = 0

    assert Undescribed.model_fields["key"].description is None
    assert EngineConfig.model_fields["memory_mb"].description == (
        "Memory of the shuffle over all workers together, in MB; beyond it, rows are spilled to disk."
    )


def test_fingerprints_of_the_presets_are_those_of_the_first_release() -> None:
    """The configuration's part in the name of a model stays as it is."""
    site = load_site(REPOSITORY / "pf_assets" / "demo.yaml", environment={"PF_DATA_DIR": "/pf"})
    assert site.training.towers_config.fingerprint() == demo().fingerprint() == "6686d009d3a3b692"
    assert paper().fingerprint() == "4baa2990b7740d87"
    assert tiny().fingerprint() == "e419abd5ed0da6b6"
