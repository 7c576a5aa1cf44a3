"""Group `model`, its end: the candidate is judged beside the champion, and takes its place if the rule says so."""

import enum
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from pf_assets.metadata import Metadata, table
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking import Promotion, RegisteredModel, Tracking, run_url
from pf_core.atomic import MANIFEST, exclusive, read_json, relying_on, write_json
from pf_core.contracts import PipelineError
from pf_core.packing import command
from pf_core.site import Site
from pf_core.training_set import latest_training_set, open_training_set

if TYPE_CHECKING:
    from pf_core.promotion import Decision, Judged

GROUP = "model"


class PromoteWhen(enum.StrEnum):
    """What a run does with the rule's decision."""

    auto = "auto"
    never = "never"
    always = "always"


class EvaluationRun(dg.Config):
    """`promote`: as the rule decides (auto), never, or always; the judgement is the same."""

    promote: PromoteWhen = PromoteWhen.auto


def offline_evaluation_asset(site: Site) -> dg.AssetsDefinition:
    rule = site.serving.promotion

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        deps=[
            "training_set",
            "pinnerformer_model",
            dg.AssetDep("raw_actions", partition_mapping=dg.LastPartitionMapping()),
        ],
        kinds={"pytorch", "mlflow"},
        metadata={"recall_tolerance": rule.recall_tolerance, "coverage_tolerance": rule.coverage_tolerance},
    )
    def offline_evaluation(context: dg.AssetExecutionContext, config: EvaluationRun) -> dg.MaterializeResult[None]:
        """Candidate and champion on users whom training never saw, in the days after the cut (paper, section 4.1).

        A model that is not good enough must not reach anybody, and one that is need not wait for a person. A new
        champion serves from the next new day of user_embeddings on, which embeds everybody with it.
        """
        from pf_core.promotion import decide, evaluate_models  # brings torch, which takes seconds

        started, tracking = time.monotonic(), Tracking(site)
        candidate, champion = tracking.candidate(), tracking.champion()
        if candidate is None:
            raise PipelineError(f"no model is registered yet. Train one: {command('training_set,pinnerformer_model')}")
        models = {model.served_version: model.path for model in (candidate, champion) if model is not None}
        folder = evaluation_dir(site)
        with (
            exclusive(folder, "offline_evaluation"),
            relying_on(latest_training_set(site).parent, "training_set"),
        ):
            data = open_training_set(latest_training_set(site))
            evaluation = evaluate_models(site, data, models, progress=context.log.info)
            ours = evaluation.models[candidate.served_version]
            theirs = None if champion is None else evaluation.models[champion.served_version]
            decision = decide(ours, theirs, rule)
            if candidate != champion:
                decision = _as_asked(decision, config.promote, _undone(tracking, candidate))
            context.log.info(f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}")
            _note(tracking, candidate, ours, decision)
            if decision.promote:
                tracking.promote(candidate.version, because=decision.reason)
            manifest = {
                **asdict(evaluation),
                "candidate": candidate.served_version,
                "champion": None if champion is None else champion.served_version,
                "candidate_is_champion": decision.promote or candidate == champion,
                "decision": asdict(decision) | {"asked_for": config.promote.value},
                "seconds": time.monotonic() - started,
            }
            write_json(folder / MANIFEST, manifest)
        runs = {"mlflow_candidate": candidate} | ({} if champion is None else {"mlflow_champion": champion})
        urls = {name: run_url(tracking.run_of(model), mlflow_server()) for name, model in runs.items()}
        return dg.MaterializeResult(metadata=describe_evaluation(folder, manifest, urls))

    return offline_evaluation


def evaluation_dir(site: Site) -> Path:
    return site.directory / "offline_evaluation"


def _as_asked(decision: "Decision", wish: PromoteWhen, undone: Promotion | None) -> "Decision":
    """What the run asks for has precedence over the rule, and so has a person who undid this model's promotion."""
    if wish == PromoteWhen.auto and undone is not None:
        wish, said = (
            PromoteWhen.never,
            f"its promotion was undone at {undone.undone_at}",
        )
    else:
        said = f"promote: {wish} was asked for"
    if wish == PromoteWhen.auto or decision.promote == (wish == PromoteWhen.always):
        return decision
    return replace(decision, promote=not decision.promote, reason=f"{said} (the rule finds: {decision.reason})")


def _undone(tracking: Tracking, model: RegisteredModel) -> Promotion | None:
    promotions = [promotion for promotion in tracking.promotions() if promotion.version == model.version]
    return promotions[-1] if promotions and promotions[-1].undone_at is not None else None


def _note(tracking: Tracking, candidate: RegisteredModel, judged: "Judged", decision: "Decision") -> None:
    """Keep the judgement with the model: numbers as metrics of its run, all of it as tags that the registry shows."""
    metrics = {
        "evaluation_recall_at_10": judged.recall_at_10,
        "evaluation_recall_at_10_low": judged.recall_interval[0],
        "evaluation_recall_at_10_high": judged.recall_interval[1],
        "evaluation_p90_coverage_at_10": judged.p90_coverage_at_10,
    }
    tags = {name: f"{value:.4f}" for name, value in metrics.items()}
    tags["evaluation_decision"] = f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}"
    tracking.note(candidate, metrics=metrics, tags=tags)


def describe_evaluation(folder: Path, manifest: Mapping[str, Any], urls: Mapping[str, str]) -> Metadata:
    roles = {manifest["candidate"]: "candidate", manifest["champion"]: "champion"}
    if manifest["candidate"] == manifest["champion"]:
        roles[manifest["candidate"]] = "candidate and champion"
    candidate = manifest["models"][manifest["candidate"]]
    return {
        "candidate": manifest["candidate"],
        "champion_before": manifest["champion"] or "none",
        "decision": ("promoted: " if manifest["decision"]["promote"] else "not promoted: ")
        + manifest["decision"]["reason"],
        "recall_at_10": candidate["recall_at_10"],
        "p90_coverage_at_10": candidate["p90_coverage_at_10"],
        "judged": table(
            [
                {
                    "who": f"{name} ({roles[name]})" if name in roles else name,
                    "recall_at_10": f"{judged['recall_at_10']:.4f}",
                    "95 % interval": "{:.4f} to {:.4f}".format(*judged["recall_interval"]),
                    "p90_coverage_at_10": f"{judged['p90_coverage_at_10']:.4f}",
                    "users without embedding": judged["users_without_embedding"],
                }
                for name, judged in (manifest["models"] | manifest["baselines"]).items()
            ]
        ),
        "days": f"after {manifest['cut_ds']}, until {manifest['last_ds']}",
        "users": manifest["num_users"],
        "positives": manifest["num_positives"],
        "index_pins": manifest["num_pins"],
        "positives_of_unknown_users": manifest["num_unknown_users"],
        "positives_on_unknown_pins": manifest["num_unknown_pins"],
        "training_set": manifest["training_set"],
        "seconds": round(manifest["seconds"], 1),
        **{name: dg.MetadataValue.url(url) for name, url in urls.items()},
        "path": dg.MetadataValue.path(folder / MANIFEST),
    }


def evaluation_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="offline_evaluation")
    def candidate_was_promoted() -> dg.AssetCheckResult:
        """A candidate that is not champion waits for somebody to look at it."""
        path = evaluation_dir(site) / MANIFEST
        manifest = read_json(path) if path.exists() else None
        return dg.AssetCheckResult(
            passed=manifest is not None and manifest["candidate_is_champion"],
            severity=dg.AssetCheckSeverity.WARN,
            description="nothing was judged yet" if manifest is None else manifest["decision"]["reason"],
        )

    return [candidate_was_promoted]
