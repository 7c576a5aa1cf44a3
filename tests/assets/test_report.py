"""The report from a store of scores: everything that the paper has is in it, whatever was run."""

import re
from pathlib import Path

import pytest

from pf_assets.report.report import NoisyFacts, RecipeFacts, ReportFacts, build_report, render_html, render_markdown
from pf_assets.report.run import describe_origin
from pf_assets.report.views import NOT_EXPLAINED, Report
from pf_assets.tracking.experiment_store import Outcome
from pf_assets.tracking.runs import TrackedRun
from pf_core.config.site import Site, load_site
from pf_core.config.source import Positive
from pf_core.config.training import TrainConfig, demo
from pf_core.experiments.bootstrap import Interval
from pf_core.experiments.claims import Results
from pf_core.experiments.paper_claims import all_claims
from pf_core.experiments.paper_tables import paper_sections
from pf_core.experiments.recipe import BASE, Recipe
from pf_core.experiments.recipes import experiments
from pf_core.training.plan import code_fingerprint
from tests.support.outcomes import TASKS, make_store

DEMO = Path(__file__).parents[2] / "pf_assets" / "demo.yaml"
PNG = b"\x89PNG\r\n\x1a\n"
BASE_MODEL = demo().model
CLAIMS = all_claims(BASE_MODEL, TASKS)
SECTIONS = paper_sections(BASE_MODEL, TASKS)
OURS = {"staleness", "inference-cost"}


def base_config() -> TrainConfig:
    return site().training.towers_config


def site() -> Site:
    return load_site(DEMO, environment={})


def make_facts() -> ReportFacts:
    recipes = {
        name: RecipeFacts(
            seconds=120.0,
            num_parameters=123_456,
            config=experiment.configure(base_config(), seed=0).model_dump(mode="json"),
            mlflow_url=f"http://localhost:5000/#/runs/{name}",
            by_density={100: Interval(0.4, 0.35, 0.45), 400: Interval(0.1, 0.08, 0.12)} if name == BASE else {},
        )
        for name, experiment in experiments(site()).items()
        if isinstance(experiment, Recipe)
    }
    return ReportFacts(
        origin="The models were trained at commit 0123abcd.",
        facts={"Site": "demo", "Users trained on": 24_000, "Cut": "2026-03-17", "Odd <name>": "a & b"},
        recipes=recipes,
        noisy={
            2.0: NoisyFacts(
                "noise_2",
                RecipeFacts(seconds=99.0),
                {
                    kind: {"pinnersage_20": {100: Interval(0.2, 0.15, 0.25), 400: Interval(0.1, 0.05, 0.15)}}
                    for kind in ("all positives", "new pins")
                },
            )
        },
        explanations={"more-layers": "The recalls of this store are drawn at random."},
        feature_dim=64,
        left_out=["sasrec, seed 0: there is a newer run"],
    )


@pytest.fixture(scope="module")
def store() -> Results:
    return make_store(experiments(site()), BASE_MODEL)


@pytest.fixture(scope="module")
def report(store: Results) -> Report:
    return build_report(store, make_facts())


def test_every_table_figure_and_claim_is_there(report: Report, tmp_path: Path) -> None:
    page, text = render_html(report), render_markdown(report, tmp_path / "figures")
    for shown in (page, text):
        for section in SECTIONS:
            assert section.title in shown
            assert all(row.label in shown for row in section.rows)
        assert all(f"{claim.id}" in shown for claim in CLAIMS)
        assert shown.index("trained at commit 0123abcd") < shown.index("At a glance")
    assert {section.name for section in report.sections} == {section.name for section in SECTIONS} | OURS
    for view in report.sections:
        assert view.pictures, view.name
    figures = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert figures == {section.name for section in SECTIONS} | OURS | {"index-density", "content-noise"}
    assert set(re.findall(r"!\[[^]]*\]\(figures/([\w-]+)\.png\)", text)) == figures
    assert page.count('src="data:image/png;base64,') == len(figures)
    assert all((tmp_path / "figures" / f"{name}.png").read_bytes().startswith(PNG) for name in figures)


def test_the_first_page_names_the_commit_and_a_change_of_the_training_code() -> None:
    def trained_at(commit: str, code: str) -> Outcome:
        run = TrackedRun(experiment_id="1", run_id="1")
        tags = {"mlflow.source.git.commit": commit, "code": code}
        return Outcome(
            **{"recipe": BASE, "seed": 0, "run": run, "training_set": "", "question": "", "ended_at_ms": 0},
            **{"artifacts": Path(), "params": {"seed": "0"}, "tags": tags},
        )

    current = code_fingerprint()
    trained = [trained_at("0123456789abcdef", current), trained_at("0123456789abcdef", current)]
    assert describe_origin(trained) == f"The models were trained at commit 0123456789ab (training code {current})."
    older = describe_origin([*trained, trained_at("fedcba9876543210", "0000")])
    assert "at commit 0123456789ab, fedcba987654" in older
    assert older.endswith(f"The training code has changed since, to {current}: models trained now may differ.")
    assert describe_origin([]) == ""


def test_the_page_needs_nothing_else(report: Report) -> None:
    page = render_html(report)
    assert re.findall(r"<(?:script|link|iframe)", page) == []
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert "url(" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


def test_foreign_text_is_escaped(report: Report) -> None:
    page = render_html(report)
    assert "Odd &lt;name&gt;" in page
    assert "a &amp; b" in page


AWKWARD_TASKS = (
    *("save|+", "<b>bold</b>", "`tick`", "``", "$x$ $", "\x1b[31mred", "two\nlines", "*star*", "[a](http://b)"),
    *("\u202etxt", "a" * 400),
)


def test_action_types_are_shown_and_not_executed(tmp_path: Path) -> None:
    """A log's words are on the page and in the text as they are, also in tables, code and figures."""
    awkward = site().model_copy(
        update={"source": site().source.model_copy(update={"positive": Positive(action_types=AWKWARD_TASKS)})}
    )
    chosen = {name: each for name, each in experiments(awkward).items() if "multi-task" in each.sets}
    assert len(chosen) == 1 + len(AWKWARD_TASKS)
    made = build_report(make_store(chosen, BASE_MODEL, num_users=20, tasks=AWKWARD_TASKS), ReportFacts())
    page, text = render_html(made), render_markdown(made, tmp_path / "figures")
    for shown in (page, text):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\\x1b[31mred" in shown.replace("\\\\x1b\\[", "\\x1b[")
        assert "a" * 201 not in shown
    assert "<b>bold" not in page.casefold()
    section = text.split("## Learning several tasks at once")[1].split("\n## ")[0]
    tables = [line for line in section.splitlines() if line.startswith("| ") and " only |" in line]
    assert len(tables) == len(AWKWARD_TASKS)
    columns = {len(re.sub(r"\\.", "", line).split("|")) for line in tables}
    assert len(columns) == 1, "a | in a word makes no column"
    assert "\\<b\\>bold\\</b\\> only" in text
    outside_code = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", re.sub(r"\\.", "", text))
    assert "<b>" not in outside_code.casefold()


def test_the_counts_are_those_of_the_papers_claims(report: Report) -> None:
    papers = [claim for claim in CLAIMS if not claim.is_ours]
    assert report.num_claims == sum(report.counts.values()) == len(papers)
    assert report.counts["not run"] == 0
    assert report.counts["reproduced"] > len(papers) / 2  # the recalls are the paper's own
    assert report.counts == {
        verdict: sum(claim.verdict == verdict for claim in report.claims if not claim.is_ours)
        for verdict in report.counts
    }


def test_a_failure_is_explained_or_says_that_it_is_not(report: Report) -> None:
    for claim in report.claims:
        if claim.verdict in ("contradicted", "not distinguishable"):
            expected = "The recalls of this store are drawn at random." if claim.id == "more-layers" else NOT_EXPLAINED
            assert claim.explanation == expected
        else:
            assert claim.explanation is None
    assert NOT_EXPLAINED in render_html(report)


def test_a_table_has_the_papers_numbers_and_ours(report: Report) -> None:
    section = next(view for view in report.sections if view.name == "objectives")
    assert section.table is not None
    rows = {label: cells for label, _, cells in section.table.rows}
    next_action = rows["Next action"]
    assert [cell.text for cell in next_action[:1]] == ["0.186"]
    assert float(next_action[1].text) == pytest.approx(0.186, abs=0.01)
    low, high = map(float, next_action[1].interval.split(" – "))
    assert low < float(next_action[1].text) < high
    assert next_action[2].text == f"−{100 * (1 - 0.186 / 0.229):.0f} %"
    assert rows["Dense all action + SASRec"][0].text == "–"


@pytest.mark.parametrize(
    "names",
    [[BASE], ["popularity_7d"], ["sasrec"], [BASE, "sasrec", "length_8"], ["layers_1_hidden_32", "only_click"]],
    ids=lambda names: "+".join(names),
)
def test_any_subset_makes_a_report(store: Results, names: list[str], tmp_path: Path) -> None:
    part = Results({name: store.outcomes[name] for name in names})
    report = build_report(part, ReportFacts())
    page, text = render_html(report), render_markdown(report, tmp_path / "figures")
    assert report.counts["not run"] > report.num_claims / 2
    for shown in (page, text):
        assert "not run" in shown
        assert all(claim.id in shown for claim in CLAIMS)


def test_without_a_second_seed_the_rule_says_so(store: Results) -> None:
    single = Results({name: seeds[:1] for name, seeds in store.outcomes.items() if name in (BASE, "sasrec")})
    assert any("No recipe has two seeds" in sentence for sentence in build_report(single, ReportFacts()).rule)
