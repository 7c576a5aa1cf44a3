"""Every directional claim of the paper's offline experiments (section 4.2, masking, appendix A.4), made testable.

The words of the paper became statistics before there was any result: "collapse" is less than a tenth, "comparable" at
least four fifths, "diminishing returns" a smaller gain for a doubling beyond the middle of the range than before it,
"longer is better" a positive slope over doublings, "no substantial change" a change within 5 %. Claims of our own are
marked and are not counted as the paper's. Table numbers are those of the paper, in which 7 and 8 are A/B experiments.
"""

from collections.abc import Sequence

from pf_core.config.serving import Frequency
from pf_core.config.training import ModelConfig
from pf_core.experiments.ablation_claims import ablation_claims
from pf_core.experiments.claims import COLLAPSE, COMPARABLE, Claim, Part, alike, best, greater, no_better, rising
from pf_core.experiments.quantities import coverage, drop, entropy, recall
from pf_core.experiments.recipe import BASE


def all_claims(base: ModelConfig, tasks: Sequence[str]) -> list[Claim]:
    """Return the claims for the model that the recipes change (`base`) and its positive action types (`tasks`)."""
    return [
        *_model_comparison(),
        *_batch_vs_realtime(),
        *_objectives(),
        *_negatives(),
        *ablation_claims(base, tasks),
    ]


def _model_comparison() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part, where: str = "Table 1, 4.2.1") -> Claim:
        return Claim(id=id, section="model-comparison", where=where, says=says, parts=parts)

    clusters_5, clusters_20 = "pinnersage_5", "pinnersage_20"
    return [
        claim(
            "beats-oracle-5",
            "One PinnerFormer embedding retrieves more than PinnerSage with an oracle over 5 clusters.",
            greater(recall(BASE), recall(clusters_5)),
        ),
        claim(
            "beats-oracle-20",
            "One PinnerFormer embedding retrieves more than PinnerSage with an oracle over 20 clusters.",
            greater(recall(BASE), recall(clusters_20)),
        ),
        claim(
            "more-clusters-recall",
            "An oracle over 20 clusters retrieves more than one over 5.",
            greater(recall(clusters_20), recall(clusters_5)),
        ),
        claim(
            "more-clusters-diverse",
            "More PinnerSage clusters make a user's results more diverse.",
            greater(entropy(clusters_20), entropy(clusters_5)),
        ),
        claim(
            "oracle-20-more-diverse",
            "With enough clusters (20), PinnerSage's results for a user are more diverse than PinnerFormer's.",
            greater(entropy(clusters_20), entropy(BASE)),
        ),
        claim(
            "pinnersage-coverage",
            "PinnerSage retrieves more unique pins of the index than PinnerFormer.",
            *(greater(coverage(clusters), coverage(BASE)) for clusters in (clusters_5, clusters_20)),
        ),
        claim(
            "variants-comparable",
            "A variant of PinnerFormer (in-batch negatives, corrected) retrieves comparably many unique pins (at least "
            f"{100 * COMPARABLE:g} % of PinnerSage's) with a higher recall.",
            greater(coverage("in_batch_corrected"), COMPARABLE * coverage(clusters_20)),
            greater(recall("in_batch_corrected"), recall(clusters_20)),
            where="4.2.1, Table 4",
        ),
        claim(
            "popularity-coverage",
            "A baseline that memorizes popularity has a coverage close to 0 (less than a tenth of PinnerFormer's).",
            greater(coverage(BASE), COLLAPSE * coverage("popularity_ever")),
            where="4.1",
        ),
    ]


def _batch_vs_realtime() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="batch-vs-realtime", where="Table 2, 4.2.2", says=says, parts=parts)

    def beats_sasrec(frequency: Frequency) -> Part:
        return greater(recall(BASE, frequency), recall("sasrec", frequency))

    def loses_less(before: Frequency, after: Frequency) -> Part:
        of_sasrec, of_base = (drop(recall(recipe, before), recall(recipe, after)) for recipe in ("sasrec", BASE))
        return Part("greater", of_sasrec - of_base, None)

    return [
        *(
            claim(
                f"fresher-is-better-{recipe}",
                f"{name}'s recall grows with the frequency of inference: once, daily, realtime.",
                *rising(recall(recipe, "once"), recall(recipe, "daily"), recall(recipe, "realtime")),
            )
            for recipe, name in ((BASE, "PinnerFormer"), ("sasrec", "SASRec"))
        ),
        claim(
            "beats-sasrec-once",
            "Inferred once, PinnerFormer retrieves more than SASRec.",
            beats_sasrec("once"),
        ),
        claim(
            "beats-sasrec-daily",
            "Inferred daily, PinnerFormer retrieves more than SASRec.",
            beats_sasrec("daily"),
        ),
        claim(
            "beats-sasrec-realtime",
            "Even in realtime, PinnerFormer retrieves more than a model trained for the next action.",
            beats_sasrec("realtime"),
        ),
        claim(
            "smaller-loss-realtime-daily",
            "From realtime to daily inference, dense all action loses a smaller share of its recall than SASRec.",
            loses_less("realtime", "daily"),
        ),
        claim(
            "smaller-loss-daily-once",
            "From daily inference to one inference only, dense all action loses a smaller share than SASRec.",
            loses_less("daily", "once"),
        ),
    ]


def _objectives() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="objectives", where="Table 3, 4.2.3", says=says, parts=parts)

    return [
        claim(
            "sasrec-over-next-action",
            "Predicting the next action at every position (SASRec) beats predicting it from the newest alone.",
            greater(recall("sasrec"), recall("next_action")),
        ),
        claim(
            "all-action-over-next-action",
            "Predicting all actions of 28 days beats both ways of predicting the next action.",
            *(greater(recall("all_action"), recall(other)) for other in ("sasrec", "next_action")),
        ),
        claim(
            "dense-over-all-action",
            "Dense all action beats all action in recall.",
            greater(recall(BASE), recall("all_action")),
        ),
        claim(
            "next-action-coverage",
            "Predicting only the next action retrieves more of the index than predicting all actions.",
            *(
                greater(coverage(next_one), coverage(all_of_them))
                for next_one in ("next_action", "sasrec")
                for all_of_them in ("all_action", BASE)
            ),
        ),
        claim(
            "dense-coverage",
            "Dense all action retrieves more of the index than all action.",
            greater(coverage(BASE), coverage("all_action")),
        ),
        claim(
            "window-28-days",
            "A window of 28 days beats one of 14 days, although 14 days are evaluated.",
            greater(recall(BASE), recall("dense_all_action_14d")),
        ),
        claim(
            "summed-no-better",
            "Summing the losses of several objectives does not outperform the best single one.",
            no_better(recall("summed_objectives"), recall(BASE)),
        ),
    ]


def _negatives() -> list[Claim]:
    def claim(id: str, says: str, *parts: Part) -> Claim:
        return Claim(id=id, section="negatives", where="Table 4, 4.2.4", says=says, parts=parts)

    mixed = {"corrected": BASE, "uncorrected": "mixed_uncorrected"}
    in_batch = {spc: f"in_batch_{spc}" for spc in mixed}
    random = {spc: f"random_{spc}" for spc in mixed}
    pools = {"in-batch": in_batch, "mixed": mixed}
    others = [*random.values(), *in_batch.values(), mixed["uncorrected"]]
    return [
        *(
            claim(
                f"correction-recall-{name}",
                f"Correcting for the sample probability raises the recall with {name} negatives.",
                greater(recall(pool["corrected"]), recall(pool["uncorrected"])),
            )
            for name, pool in pools.items()
        ),
        *(
            claim(
                f"correction-coverage-{name}",
                f"Correcting for the sample probability lowers the coverage with {name} negatives.",
                greater(coverage(pool["uncorrected"]), coverage(pool["corrected"])),
            )
            for name, pool in pools.items()
        ),
        claim(
            "correction-random",
            "With random negatives alone the correction changes nothing.",
            alike(recall(random["corrected"]), recall(random["uncorrected"])),
        ),
        claim(
            "in-batch-coverage",
            "In-batch negatives raise the coverage: random < mixed < in-batch, corrected or not.",
            *(
                part
                for spc in mixed
                for part in rising(coverage(random[spc]), coverage(mixed[spc]), coverage(in_batch[spc]))
            ),
        ),
        claim(
            "in-batch-recall",
            "In-batch negatives alone have a lower recall than mixed ones, corrected or not.",
            *(greater(recall(mixed[spc]), recall(in_batch[spc])) for spc in mixed),
        ),
        claim(
            "random-collapse",
            "With random negatives alone the model collapses to very similar results for all users (less than a tenth "
            "of the coverage with mixed ones).",
            *(greater(coverage(mixed[spc]), COLLAPSE * coverage(random[spc])) for spc in mixed),
        ),
        claim(
            "mixed-corrected-best",
            "Mixed negatives with correction have the highest recall of the six.",
            *best(recall(BASE), [recall(other) for other in others]),
        ),
    ]
