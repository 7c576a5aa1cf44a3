"""Base class of all configuration models."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen; unknown keys are errors. The docstring below a field becomes its description in docs/site-file.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
