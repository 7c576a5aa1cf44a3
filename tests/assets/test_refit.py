"""refitted_model through real Dagster runs with a real MLflow: what is refitted, what serves, what is compared."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli import promotion as promotion_cli
from pf_assets.launch.train_job import TrainJob
from pf_assets.tracking.served_models import ServedModels
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.config.training import tiny
from pf_core.config.training_section import LaunchConfig
from pf_core.days import ds_start_us, shift_ds
from pf_core.errors import PipelineError
from pf_core.hashing import is_held_out
from pf_core.model.checkpoint import read_description
from pf_core.storage.files import read_json
from pf_core.training.refit import current_refit
from pf_core.training.training_set import latest_training_set, open_training_set, read_training_set_manifest
from tests.support.accepted import HELD_OUT_SHARE, copy_accepted, run_assets
from tests.support.judging import CUT, LAST, make_judged_site, write_model
from tests.support.shared import SharedSites
from tests.support.training_here import RUN_RANKS, run_rank_here

WEEKLY = ("pinnerformer_model", "offline_evaluation", "refitted_model")


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return copy_accepted(shared_sites, tmp_path / "site")


@pytest.fixture
def instance(memory_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return memory_instance


@pytest.fixture(autouse=True)
def _train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN_RANKS, run_rank_here)


def refit(site: Site, instance: dg.DagsterInstance, **config: bool) -> dg.AssetMaterialization:
    result = run_assets(site, instance, "refitted_model", refitted_model=config)
    assert result.success
    return result.asset_materializations_for_node("refitted_model")[0]


def without_refit(site: Site) -> Site:
    return site.model_copy(update={"training": site.training.model_copy(update={"refit": False})})


def register(site: Site, name: str, *, refit_of: RegisteredModel | None = None) -> RegisteredModel:
    """Register a model with random weights, as the candidate or as a refit."""
    tracking, run_dir = Tracking(site), site.directory / "models" / name
    write_model(run_dir / "model", is_good=False)
    tracked = tracking.start(run_dir, name=name, params={}, tags={})
    tracking.keep(tracked, [run_dir / "model"])
    registered = tracking.register(tracked, run_dir, model_version=name, refit_of=refit_of, cut_ds=LAST)
    return next(model for model in tracking.versions() if model.version == registered.version)


def served(site: Site) -> str:
    """Name of the model that embeds a new day."""
    name = ServedModels(site).newest(LAST).model_version
    model = Tracking(site).served()
    assert model is not None
    assert model.served_version == name
    return name


def versions(site: Site) -> list[int]:
    return [model.version for model in Tracking(site).versions()]


def test_an_accepted_candidate_is_refitted_and_serves(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def look(context: dg.AssetExecutionContext, launch: LaunchConfig, job_file: Path, **receive: Any) -> None:
        job = TrainJob.model_validate(read_json(job_file))
        data = open_training_set(Path(job.training_set))
        seen.update(config=job.config, path=data.path, train=data.train.user_ids(), held_out=data.held_out.user_ids())
        seen.update(last_us=int(data.train.ts.max()), cut_ds=data.manifest["cut_ds"])
        run_rank_here(context, launch, job_file, **receive)

    monkeypatch.setattr(RUN_RANKS, look)
    judged_set = latest_training_set(site)
    judged = Tracking(site).champion()
    assert judged is not None
    assert served(site) == judged.served_version  # as long as there is no refit
    shown = refit(site, instance).metadata

    # The refit's training set: until the newest day, and still without the held-out users
    assert not is_held_out(seen["train"], HELD_OUT_SHARE).any()
    assert is_held_out(seen["held_out"], HELD_OUT_SHARE).all()
    assert seen["cut_ds"] == LAST
    assert ds_start_us(LAST) <= seen["last_us"] < ds_start_us(shift_ds(LAST, 1))
    assert seen["path"].is_relative_to(site.directory / "training_set" / "refit")
    assert not (site.directory / "training_set" / "refit").exists()  # it would keep users who are forgotten later
    assert seen["config"] == tiny()  # the same recipe

    # The judged model's set is still the published one
    assert latest_training_set(site) == judged_set
    assert read_training_set_manifest(judged_set)["cut_ds"] == CUT
    train = open_training_set(judged_set).train
    assert pa.array(sorted(train.user_ids().to_pylist())).equals(pa.array(sorted(seen["train"].to_pylist())))

    # The registry links the two
    tracking = Tracking(site)
    refitted, known = tracking.versions()
    assert known == judged == tracking.champion() == tracking.candidate()
    assert (refitted.version, refitted.judged_version) == (2, 1)
    assert refitted.tags["refit_of"] == judged.served_version
    assert refitted.tags["cut_ds"] == LAST
    assert (read_description(judged.path)["cut_ds"], read_description(refitted.path)["cut_ds"]) == (CUT, LAST)
    card = tracking._client.get_model_version(tracking.name, "2").description
    assert f"Refit of version 1 ({judged.served_version}) until {LAST}" in card
    assert "figures of offline_evaluation are those of version 1" in card
    assert not any(tag.startswith("evaluation_") for tag in refitted.tags)
    assert tracking._client.get_run(refitted.run_id).data.tags["judged_version"] == "1"

    # It serves, and page and manifest say which figures belong to which
    assert served(site) == refitted.served_version
    manifest = current_refit(site)
    assert manifest is not None
    assert (manifest["refit_of"], manifest["judged_version"]) == (judged.served_version, 1)
    assert (manifest["judged_cut_ds"], manifest["cut_ds"]) == (CUT, LAST)
    assert (shown["refitted"].value, shown["registry_version"].value) == (True, 2)
    assert f"offline_evaluation judged {judged.served_version}" in str(shown["figures"].value)

    # Once more: nothing is trained, and there is no other version
    monkeypatch.setattr(RUN_RANKS, _refuse_to_train)
    assert refit(site, instance).metadata["registry_version"].value == 2
    assert versions(site) == [2, 1]


def _refuse_to_train(*arguments: object, **options: object) -> None:
    raise PipelineError("no training was expected")


def test_a_rejected_candidate_is_not_refitted(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    refit(site, instance)
    before = served(site)
    monkeypatch.setattr(RUN_RANKS, _refuse_to_train)
    rejected = register(site, "rejected")
    assert run_assets(site, instance, "offline_evaluation", offline_evaluation={"promote": "never"}).success
    shown = refit(site, instance).metadata
    assert shown["refitted"].value is False
    assert f"candidate {rejected.served_version} is not the champion (not promoted: " in str(shown["reason"].value)
    assert f"{before} keeps serving" in str(shown["reason"].value)
    assert served(site) == before
    assert versions(site) == [3, 2, 1]
    # A person may have the champion refitted nevertheless: there are no newer days, so that it is there already
    assert refit(site, instance, champion=True).metadata["registry_version"].value == 2


def test_without_an_accepted_model_nothing_is_refitted(
    shared_sites: SharedSites, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    site = shared_sites.copy("judged", lambda root: shared_sites.add_mlflow(make_judged_site(root)), tmp_path)
    assert refit(site, instance).metadata["reason"].value == "no model was accepted yet"
    register(site, "waiting")
    assert refit(site, instance).metadata["reason"].value == "no model was accepted yet"
    assert versions(site) == [1]


def test_a_refitted_champion_is_never_compared(site: Site, instance: dg.DagsterInstance) -> None:
    refit(site, instance)
    champion, refitted = Tracking(site).champion(), served(site)
    assert champion is not None
    new = {"pinnerformer_model": {"changes": {"seed": 1}}, "offline_evaluation": {"promote": "always"}}
    weekly = run_assets(site, instance, *WEEKLY, **new)
    assert weekly.success
    manifest = read_evaluation(site)
    assert manifest is not None
    assert manifest["champion"] == champion.served_version
    assert manifest["candidate"] not in (champion.served_version, refitted)
    assert refitted not in manifest["summaries"]
    assert refitted not in manifest["by_day"]
    newest = Tracking(site).versions()[0]  # the weekly run has refitted the new champion
    assert newest.tags["refit_of"] == manifest["candidate"]
    assert served(site) == newest.served_version
    Tracking(site).undo_promotion(because="complaints")
    assert served(site) == refitted


def test_a_judged_model_of_the_newest_day_needs_no_refit(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pf_core.training.refit.newest_timelines", lambda _: CUT)
    assert f"was trained until {CUT}" in str(refit(site, instance).metadata["reason"].value)
    assert versions(site) == [1]


def test_a_refit_that_learned_nothing_does_not_serve(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = served(site)
    for module in ("pf_assets.launch.training", "pf_core.training.refit"):
        monkeypatch.setattr(f"{module}.training_fault", lambda history: "its loss did not fall")
    result = run_assets(site, instance, "refitted_model")
    assert result.success
    (check,) = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("refit_loss_fell_and_is_finite", False)
    assert "its loss did not fall" in (check.description or "")
    assert served(site) == judged
    assert versions(site) == [1]


def test_an_interrupted_refit_leaves_the_judged_model_serving(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = served(site)
    with monkeypatch.context() as patch:
        patch.setattr(RUN_RANKS, _refuse_to_train)
        assert not run_assets(site, instance, "refitted_model").success
    assert not (site.directory / "training_set" / "refit").exists()
    assert served(site) == judged
    refit(site, instance)
    assert served(site) != judged


# What serves after promotions


def promote(site: Site, model: RegisteredModel) -> None:
    Tracking(site).promote(model.version, because="a test")


def test_the_served_version_follows_promotions_and_their_undoing(site: Site) -> None:
    first = Tracking(site).champion()
    assert first is not None
    first_refit = register(site, "first_refit", refit_of=first)
    assert served(site) == first_refit.served_version
    second = register(site, "second")
    assert served(site) == first_refit.served_version
    promote(site, second)
    assert served(site) == second.served_version  # until it is refitted
    second_refit = register(site, "second_refit", refit_of=second)
    assert served(site) == second_refit.served_version
    newer_refit = register(site, "newer_refit", refit_of=second)
    assert served(site) == newer_refit.served_version
    assert Tracking(site).candidate() == second
    assert served(without_refit(site)) == second.served_version
    Tracking(site).undo_promotion(because="complaints")
    assert Tracking(site).champion() == first
    assert served(site) == first_refit.served_version
    assert served(without_refit(site)) == first.served_version


def test_a_refit_is_not_promoted(site: Site) -> None:
    judged = Tracking(site).champion()
    assert judged is not None
    refitted = register(site, "refit", refit_of=judged)
    with pytest.raises(PipelineError, match=r"version 2 is a refit, .* pf promote 1 --because"):
        promote(site, refitted)
    tracking = Tracking(site)
    tracking._client.set_registered_model_alias(tracking.name, "champion", "2")  # in MLflow's UI
    assert tracking.champion() == judged
    assert served(site) == refitted.served_version
    assert [promotion.version for promotion in tracking.promotions()] == [1]


@pytest.fixture
def pf_promote(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], str]:
    monkeypatch.setattr(promotion_cli, "current_site", lambda: site)
    app = typer.Typer()
    app.command()(promotion_cli.promote)

    def output_of(arguments: Sequence[str]) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    return output_of


def test_pf_promote_names_the_refit(site: Site, pf_promote: Callable[[Sequence[str]], str]) -> None:
    judged = Tracking(site).champion()
    assert judged is not None
    register(site, "refit", refit_of=judged)
    assert f"version 2    refit-2            refit of version 1, until {LAST}" in pf_promote([])
    shown = pf_promote(["1", "--because", "a test"])
    assert "embeds all users with its refit, version 2, model refit-2;" in shown
