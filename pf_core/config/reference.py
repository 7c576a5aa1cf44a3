"""docs/site-file.md, made from the configuration models: every key with type, default and meaning.

python -m pf_core.config.reference > docs/site-file.md
"""

import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pf_core.config.site import Site
from pf_core.config.training import TrainConfig

INTRODUCTION = """# The site file

One YAML file describes a site: where its logs are, how a row becomes an action, which actions are positive, and how
the pipeline runs. `PF_SITE` names the file. `${NAME}` is replaced by an environment variable, `${NAME:-default}` has a
default; relative paths count from the file. An unknown key, a wrong type or a key that stands twice is an error that
names the key.

`pf init LOGS` writes one for logs that it has looked at. `pf check SITE.yaml` reads the logs with it, of large ones a
sample, and shows what is kept and why the rest is not, and what will become of it. Complete examples:
`pf_assets/demo.yaml`, `docs/sources/globo.yaml` (CSV, content vectors), `docs/sources/kuairand.yaml` (flags instead
of an action type), `docs/sources/movietweetings.yaml` (no header, `::`), `docs/sources/completejourney.yaml` (Parquet,
rows left out by a rule).

This page is made from the configuration models by `make docs`; a test compares them.

Shorthands: where a key takes a mapping with `column`, a plain column name is enough (`user_id: user`). A condition may
be a plain value (`is_like: 1` means equals) or a list (any of).
"""
CHANGES = """## Fields of `training.changes`

`training.preset` chooses a whole configuration, and `training.changes` replaces single fields of it. `auto` trains the
model of parts: `parts`, steps and batches are chosen from the training set, with reasons that the asset's page shows
(`pf_core/training/auto.py`). `paper`, `demo` and `tiny` train the towers: `model`, `sampling` and `loss`. The defaults
below are those of the preset `paper`.
"""
VARIANTS = {
    "NpyVectors": ", variant 1 of 2: a matrix",
    "ColumnVectors": ", variant 2 of 2: a column of the catalogue",
}
"""Additions to the titles of models that stand under one key."""

BOUNDS: dict[type[Any], tuple[str, str]] = {
    Ge: ("ge", "≥"),
    Gt: ("gt", ">"),
    Le: ("le", "≤"),
    Lt: ("lt", "<"),
    MinLen: ("min_length", "length ≥"),
    MaxLen: ("max_length", "length ≤"),
}


def site_file_reference() -> str:
    """The text of docs/site-file.md."""
    return "\n".join([INTRODUCTION, *_sections(Site), CHANGES, *_sections(TrainConfig)]).rstrip() + "\n"


def keys_without_meaning() -> list[str]:
    """Dotted keys whose field has no description."""
    return [
        _dotted(prefix, name, field)
        for root in (Site, TrainConfig)
        for prefix, model in _models("", root)
        for name, field in _fields(model)
        if not _meaning(field)
    ]


def _sections(root: type[BaseModel]) -> list[str]:
    """A section for each model; a model that stands under several keys has one section, named by all of them."""
    prefixes: dict[type[BaseModel], list[str]] = {}
    for prefix, model in _models("", root):
        prefixes.setdefault(model, []).append(prefix)
    return [_section(keys, model) for model, keys in prefixes.items()]


def _models(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The model of each section of the file, in the order of the keys, with the dotted key where it stands."""
    yield prefix, model
    for name, field in _fields(model):
        for inner, suffix in _inner_models(field.annotation):
            yield from _models(f"{_dotted(prefix, name, field)}{suffix}", inner)


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _dotted(prefix: str, name: str, field: FieldInfo) -> str:
    key = field.alias or name
    return f"{prefix}.{key}" if prefix else key


def _inner_models(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The models in a type: the type itself, the elements of a list (`[]`), the values of a mapping (`.*`)."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation, suffix
        return
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _inner_models(arguments[0], suffix)
    elif origin in (tuple, list):
        yield from _inner_models(arguments[0], f"{suffix}[]")
    elif origin is dict:
        yield from _inner_models(arguments[1], f"{suffix}.*")
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _inner_models(argument, suffix)


def _section(prefixes: list[str], model: type[BaseModel]) -> str:
    title = "### " + ", ".join(f"`{prefix}`" for prefix in prefixes) + VARIANTS.get(model.__name__, "")
    if prefixes == [""]:
        title = "## Keys" if model is Site else "### Top level of the changes"
    about = inspect.cleandoc(model.__doc__ or "").strip()
    lines = [title, ""]
    if about and not about.startswith("Usage docs"):
        lines += [about, ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in _fields(model):
        cells = (f"`{field.alias or name}`", _type_text(field), _default_text(field), _meaning(field))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _type_text(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(constraint, attribute):g}"
        for constraint in field.metadata
        for kind, (attribute, sign) in BOUNDS.items()
        if isinstance(constraint, kind)
    ]
    return ", ".join([_name_type(field.annotation), *bounds])


def _name_type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _name_type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name_type(argument) for argument in arguments))
    if origin in (tuple, list):
        return f"list of {_name_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_name_type(arguments[0])} to {_name_type(arguments[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        value = field.default_factory()  # type: ignore[call-arg]
        return "number of cores" if isinstance(value, int) else f"`{json.dumps(value)}`"
    if field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return "its defaults"
    return f"`{json.dumps(field.default)}`"


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    print(site_file_reference(), end="")
