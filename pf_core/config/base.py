"""What all configuration models share."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
