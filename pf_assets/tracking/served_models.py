"""Which model embeds a day: the registry's champion, or the one that the day was embedded with before."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pf_assets.settings import mlflow_server
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.embeddings.tables import embedding_state
from pf_core.errors import PipelineError

if TYPE_CHECKING:
    from pf_core.embeddings.inference import ServedModel


class ServedModels:
    """The champion is asked for once: a promotion in the middle of a run does not reach the run."""

    def __init__(self, site: Site) -> None:
        self._tracking = Tracking(site)
        self._days = embedding_state(site)
        self._champion = self._tracking.champion()

    def champion(self, ds: str) -> "ServedModel":
        """For a day of user_embeddings, whatever it was embedded with before."""
        if self._champion is None:
            raise PipelineError(
                "there is no champion to embed with. Train one: dagster asset materialize "
                '--select "training_set,pinnerformer_model" -m pf_assets.definitions'
            )
        return _served(self._champion)

    def as_before(self, ds: str) -> "ServedModel":
        """The model that the day was embedded with; the champion for a day that is not there yet."""
        manifest = self._days.manifest(ds)
        return self.champion(ds) if manifest is None else _served(self._find(manifest["model_version"]))

    def of_users(self, ds: str) -> "ServedModel":
        """Pins are embedded with the model of the day's users, so that the two can be compared."""
        return _served(self._find(self._days.require(ds)["model_version"]))

    def url(self, manifest: Mapping[str, Any]) -> str:
        """The MLflow run of the model that a partition was made with."""
        return run_url(self._tracking.run_of(self._find(manifest["model_version"])), mlflow_server())

    def _find(self, served_version: str) -> RegisteredModel:
        if self._champion is not None and self._champion.served_version == served_version:
            return self._champion
        found = self._tracking.find_served(served_version)
        if found is None:
            raise PipelineError(
                f"model {served_version} is no longer in the registry {self._tracking.name}: re-run user_embeddings "
                "and what follows from it with the champion"
            )
        return found


def _served(model: RegisteredModel) -> "ServedModel":
    from pf_core.embeddings.inference import ServedModel  # brings torch, which takes seconds

    return ServedModel(model_version=model.served_version, path=model.path)
