"""The models of a site in MLflow: their runs (`runs.py`) and the model registry.

A model in our own format (safetensors and JSON) is an artifact of its run and a version in the registry. `candidate` is
the newest model whose loss fell, `champion` the one that serves. Registering a model makes no champion, not even of the
first one: `offline_evaluation` or `pf promote` does. Tags of the registered model keep the history of champions with
the reasons, so that a promotion can be undone. Where the history and the alias disagree, the alias is right.

A refit (`training.refit`) is a version, too, with the tags `refit_of` (the judged model) and `judged_version` (its
version). Candidate and champion are judged models: they are evaluated, compared and promoted. What serves is the
champion's newest refit, or the champion while it has none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pf_assets.tracking.database import is_database_there
from pf_assets.tracking.runs import RUN_FILE, RunStore, TrackedRun, artifact_path
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.storage.files import write_json

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.entities.model_registry import RegisteredModel as RegistryEntry


Alias = Literal["candidate", "champion"]

DECISION_TAG = "evaluation_decision"
"""Tag of an evaluated model: whether offline_evaluation promoted it, and why."""

VERDICT_TAG = "model_beats_baselines"
"""Tag of an evaluated model: whether the check of this name passed, with the figures."""

JUDGED_VERSION_TAG = "judged_version"
"""Tag of a refit: registry version of the judged model."""

REFIT_OF_TAG = "refit_of"
"""Tag of a refit: served version of the judged model."""

DATA_READ_TAG = "training_data_read_at"
"""Tag of a run: when the deletion list was last read before the training, ISO 8601."""

PROMOTION_TAG = "promotion-"
"""Prefix of the registered model's tags promotion-0000, promotion-0001, … that keep the history."""


@dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """A registry version; `path` holds model.safetensors and model.json."""

    version: int
    model_version: str
    run_id: str
    path: Path
    tags: Mapping[str, str] = field(compare=False)

    @property
    def served_version(self) -> str:
        """Name of the model wherever vectors are stored.

        It includes the registry version, because a retrained model has the same model_version and other weights.
        """
        return f"{self.model_version}-{self.version}"

    @property
    def judged_version(self) -> int | None:
        """Registry version of the judged model, if this model is a refit."""
        return int(self.tags[JUDGED_VERSION_TAG]) if JUDGED_VERSION_TAG in self.tags else None


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """When and why a version became champion; one that was undone no longer counts."""

    version: int
    because: str
    promoted_at: str | None
    """Time in UTC; None if the alias was set by other means."""
    undone_at: str | None = None
    undone_because: str | None = None


class Tracking(RunStore):
    """The runs of pinnerformer_model and its registered model; experiment and registered model have the same name."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._serves_refits = site.training.refit

    def register(
        self,
        run: TrackedRun,
        run_dir: Path,
        *,
        model_version: str,
        refit_of: RegisteredModel | None = None,
        cut_ds: str | None = None,
    ) -> TrackedRun:
        """Make the run's model the candidate, or the refit of a judged model, which `refit_of` names.

        A run's model has one registry version, however often it is registered. `cut_ds` is a refit's last day.
        """
        client = self._client
        if self._entry() is None:
            client.create_registered_model(self.name, description="User and pin towers; see the version's run.")
        known = client.search_model_versions(f"name = '{self.name}' and tags.model_version = '{model_version}'")
        of_this_run = [found for found in known if found.run_id == run.run_id]
        if of_this_run:
            version = int(of_this_run[0].version)
        else:
            source = f"{client.get_run(run.run_id).info.artifact_uri}/model"
            tags, description = {"model_version": model_version}, None
            if refit_of is not None:
                tags |= {JUDGED_VERSION_TAG: str(refit_of.version), REFIT_OF_TAG: refit_of.served_version}
                tags |= {} if cut_ds is None else {"cut_ds": cut_ds}
                description = (
                    f"Refit of version {refit_of.version} ({refit_of.served_version}) until {cut_ds}: it serves in its "
                    f"place. The figures of offline_evaluation are those of version {refit_of.version}; the refit has "
                    "seen the days of the question and is not evaluated."
                )
            version = int(
                client.create_model_version(
                    self.name, source=source, run_id=run.run_id, tags=tags, description=description
                ).version
            )
        if refit_of is None:
            client.set_registered_model_alias(self.name, "candidate", str(version))
        registered = TrackedRun(experiment_id=run.experiment_id, run_id=run.run_id, version=version)
        write_json(run_dir / RUN_FILE, asdict(registered))
        return registered

    # Models

    def champion(self) -> RegisteredModel | None:
        """Return the judged model whose promotion stands; its refit, if there is one, serves."""
        return self._by_alias("champion")

    def served(self) -> RegisteredModel | None:
        """Return the model that embeds new days: the champion's newest refit, or the champion itself."""
        champion = self.champion()
        return None if champion is None else self.refit_of(champion) or champion

    def refit_of(self, judged: RegisteredModel) -> RegisteredModel | None:
        """Return the newest refit of a judged model; None without one, or if the site file says refit: false."""
        if not self._serves_refits:
            return None
        return next((model for model in self.versions() if model.judged_version == judged.version), None)

    def candidate(self) -> RegisteredModel | None:
        return self._by_alias("candidate")

    def versions(self) -> list[RegisteredModel]:
        """Return every registered model, newest first."""
        return sorted(map(self._model_of, self._versions()), key=lambda model: -model.version)

    def find_served(self, served_version: str) -> RegisteredModel | None:
        return next((model for model in self.versions() if model.served_version == served_version), None)

    def run_of(self, model: RegisteredModel) -> TrackedRun:
        return TrackedRun(experiment_id=self._experiment_id(), run_id=model.run_id, version=model.version)

    def data_read_at(self, model: RegisteredModel) -> str | None:
        """When the deletion list was last read before this model was trained; None if its run does not say."""
        tags: Mapping[str, str] = self._client.get_run(model.run_id).data.tags
        return tags.get(DATA_READ_TAG)

    def note(self, model: RegisteredModel, *, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Add results found after training: metrics to the run, tags to the run and to the registry version."""
        self.measure(self.run_of(model), [{"step": 0, **metrics}])
        for key, value in tags.items():
            self._client.set_tag(model.run_id, key, value)
            self._client.set_model_version_tag(self.name, str(model.version), key, value)

    # Promotions

    def promote(self, version: int, *, because: str) -> None:
        """Make this version the champion; its tag keeps the reason, and the history the champion before it."""
        known = {model.version: model for model in self.versions()}
        if version not in known:
            raise PipelineError(f"{self.name} has no version {version}", "`pf promote` lists the registered models")
        judged_version = known[version].judged_version
        if judged_version is not None:
            raise PipelineError(
                f"version {version} is a refit, which serves when version {judged_version} is the champion",
                f"pf promote {judged_version} --because TEXT",
            )
        history, champion = self.promotions(), self.champion()
        self._client.set_model_version_tag(self.name, str(version), "promoted_because", because)
        if champion is None or champion.version != version:
            self._client.set_registered_model_alias(self.name, "champion", str(version))
            self._write([*history, Promotion(version=version, because=because, promoted_at=_now())])

    def undo_promotion(self, *, because: str | None = None) -> RegisteredModel:
        """Restore the champion before the current one, and return it; a second call restores the one before that."""
        history = self.promotions()
        known = {model.version: model for model in self.versions()}
        standing = [number for number, one in enumerate(history) if one.undone_at is None and one.version in known]
        if len(standing) < 2:
            raise PipelineError(
                f"{self.name} has no champion before the current one to go back to",
                "`pf promote VERSION` makes any registered version the champion",
            )
        before, last = standing[-2:]
        history[last] = replace(history[last], undone_at=_now(), undone_because=because)
        self._write(history)  # before the alias: if it is interrupted here, the promotion stands and can be undone
        self._client.set_registered_model_alias(self.name, "champion", str(history[before].version))
        return known[history[before].version]

    def promotions(self) -> list[Promotion]:
        """Return the history of champions, oldest first; the last one that was not undone serves.

        If the alias names another version, because it was moved in MLflow or `promote` was interrupted, that version
        is added to the history.
        """
        written = sorted((key, value) for key, value in self._tags().items() if key.startswith(PROMOTION_TAG))
        history = [Promotion(**json.loads(value)) for _, value in written]
        standing = [one.version for one in history if one.undone_at is None]
        champion = self.champion()
        if champion is not None and standing[-1:] != [champion.version]:
            because = champion.tags.get("promoted_because", "its alias was set in MLflow")
            history.append(Promotion(version=champion.version, because=because, promoted_at=None))
        return history

    def _write(self, history: Sequence[Promotion]) -> None:
        written = self._tags()
        for number, promotion in enumerate(history):
            key, value = f"{PROMOTION_TAG}{number:04d}", json.dumps(asdict(promotion))
            if written.get(key) != value:
                self._client.set_registered_model_tag(self.name, key, value)

    # The registry

    def _tags(self) -> Mapping[str, str]:
        entry = self._entry()
        return {} if entry is None else entry.tags

    def _by_alias(self, alias: Alias) -> RegisteredModel | None:
        entry = self._entry()
        if entry is None or alias not in entry.aliases:
            return None
        found = self._model_of(self._client.get_model_version(self.name, str(entry.aliases[alias])))
        if found.judged_version is None:
            return found
        # Somebody set the alias to a refit in MLflow: the judged model is meant, because a refit is never compared.
        return self._model_of(self._client.get_model_version(self.name, str(found.judged_version)))

    def _model_of(self, found: "ModelVersion") -> RegisteredModel:
        return RegisteredModel(
            version=int(found.version),
            model_version=found.tags["model_version"],
            run_id=str(found.run_id),
            path=artifact_path(found.source or ""),
            tags=found.tags,
        )

    def _entry(self) -> "RegistryEntry | None":
        """Return the registered model, or None before the first registration."""
        if not is_database_there(self.root):
            return None
        return next(iter(self._client.search_registered_models(f"name = '{self.name}'")), None)

    def _versions(self) -> "Sequence[ModelVersion]":
        if not is_database_there(self.root):
            return []
        return self._client.search_model_versions(f"name = '{self.name}'")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
