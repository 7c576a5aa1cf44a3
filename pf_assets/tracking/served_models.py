"""The model that embeds a day: the champion's refit, the champion, or the model that the day was embedded with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pf_assets.settings import mlflow_server
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import DECISION_TAG, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.embeddings.tables import embedding_state
from pf_core.errors import PipelineError, materialize_command

if TYPE_CHECKING:
    from pf_core.embeddings.inference import ServedModel


EMBEDDINGS = "user_embeddings,user_embedding_snapshot,pin_embeddings,pin_index,release"
"""The assets that are made with a model."""


class ServedModels:
    """Finds the model of a day. The served model is read once: a promotion during a run does not affect the run."""

    def __init__(self, site: Site) -> None:
        self._tracking = Tracking(site)
        self._days = embedding_state(site)
        self._newest = self._tracking.served()

    def newest(self, ds: str) -> "ServedModel":
        """Return the champion's refit, or the champion without one, whichever model the day was embedded with."""
        if self._newest is None:
            raise _no_champion(self._tracking.candidate())
        return _served(self._newest)

    def as_before(self, ds: str) -> "ServedModel":
        """Return the model that the day was embedded with, or `newest` for a new day."""
        manifest = self._days.manifest(ds)
        return self.newest(ds) if manifest is None else _served(self._find(manifest["model_version"], ds))

    def of_users(self, ds: str) -> "ServedModel":
        """Return the model of the day's users, for the day's pins: vectors of two models cannot be compared."""
        return _served(self._find(self._days.require(ds)["model_version"], ds))

    def url(self, manifest: Mapping[str, Any]) -> str:
        """Address of the MLflow run of the model in a partition's manifest."""
        model = self._find(manifest["model_version"], manifest["ds"])
        return run_url(self._tracking.run_of(model), mlflow_server())

    def _find(self, served_version: str, ds: str) -> RegisteredModel:
        if self._newest is not None and self._newest.served_version == served_version:
            return self._newest
        found = self._tracking.find_served(served_version)
        if found is None:
            raise PipelineError(
                f"model {served_version} is no longer in the registry {self._tracking.name}",
                f"embed the day with the champion: {materialize_command(EMBEDDINGS, ds)}",
            )
        return found


def _no_champion(candidate: RegisteredModel | None) -> PipelineError:
    """Return the error for a site without a champion, with the command that leads to one."""
    what = "there is no champion to embed with"
    if candidate is None:
        return PipelineError(
            f"{what}, and no model is registered",
            f"train and evaluate one: {materialize_command('training_set,pinnerformer_model,offline_evaluation')}",
        )
    by_hand = f"pf promote {candidate.version} --because TEXT"
    decision = candidate.tags.get(DECISION_TAG)
    if decision is None:
        return PipelineError(
            f"{what}: candidate {candidate.served_version} was not evaluated yet",
            f"evaluate it, which decides about its promotion: {materialize_command('offline_evaluation')} (or promote "
            f"it without an evaluation: {by_hand})",
        )
    return PipelineError(
        f"{what}: candidate {candidate.served_version} was evaluated and {decision}",
        f"train a better one, or promote it nevertheless: {by_hand}",
    )


def _served(model: RegisteredModel) -> "ServedModel":
    from pf_core.embeddings.inference import ServedModel  # brings torch, which takes seconds

    return ServedModel(model_version=model.served_version, path=model.path)
