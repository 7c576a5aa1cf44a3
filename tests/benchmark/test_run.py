"""A benchmark from the log to the table; peers are replaced, their own tests run them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pf_core.benchmark import run
from pf_core.benchmark.baselines import BASELINES
from pf_core.benchmark.looks import read_looks
from pf_core.benchmark.ours import our_lists
from pf_core.benchmark.page import publish_section
from pf_core.benchmark.peers.tuning import PEERS, Level
from pf_core.benchmark.run import MEANS, OURS, PAPER, PAPER_S, VECTOR, BenchmarkResult, Origin, run_benchmark
from pf_core.config.site import Site
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.model.device import single_threaded
from pf_core.storage.files import read_json
from tests.support.peers import TUNED_ON, replace_peers
from tests.support.shop import CUT_DS, DAYS, NUM_USERS, Row, shop_actions, shop_file, without_vectors, write_shop


@pytest.fixture(autouse=True)
def quick_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replace_peers(monkeypatch)
    with single_threaded():
        yield


def engine_of(site: Site) -> LocalEngine:
    return LocalEngine(num_workers=1, memory_mb=64, temp_dir=site.workspace / "tmp")


def bench(site: Site, folder: Path, *, level: Level = "quick", messages: list[str] | None = None) -> BenchmarkResult:
    origin = Origin(
        command="pf benchmark",
        date="2026-02-01",
        commit="abc",
        looks_file=folder / "looks.csv",
        looks_name="docs/looks.csv",
    )
    return run_benchmark(
        site,
        name="shop",
        level=level,
        seed=0,
        cache=folder / "cache",
        folder=folder / "out",
        start_engine=engine_of,
        origin=origin,
        progress=(messages if messages is not None else []).append,
    )


def rows_of(result: BenchmarkResult) -> dict[str, Any]:
    return {row["name"]: row for row in result.table["rows"]}


def test_preset_paper_is_not_part_of_a_quick_benchmark(tmp_path: Path) -> None:
    assert rows_of(bench(write_shop(tmp_path), tmp_path))[PAPER]["failure"] == "not part of --quick"


def test_one_row_for_each_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER_S, "quick", 40)
    messages: list[str] = []
    result = bench(write_shop(tmp_path), tmp_path, messages=messages)
    rows = rows_of(result)
    peers = [peer.label for peer in PEERS.values() if "quick" in peer.levels]
    assert list(rows) == [OURS, VECTOR, PAPER, *BASELINES, *MEANS, *peers]
    assert rows[PAPER]["failure"] == "MemoryError: too large"
    assert rows["EASE"]["failure"] == "ran out of its budget of 40 s (final)"
    assert rows["item-kNN"]["failure"] == "ValueError: item_knn broke"
    assert rows["iALS (implicit)"]["note"] == "1 of 3 settings finished"
    assert {name for name, row in rows.items() if "failure" in row} == {
        PAPER,
        *(label for label in peers if label != "iALS (implicit)"),
    }
    assert "summary" in rows[OURS]
    assert rows[OURS]["positives_without_vector"] == 0.0
    assert rows[VECTOR]["summary"] == rows[OURS]["summary"]  # towers have no memory
    assert rows[VECTOR]["note"] == "the model has no memory: as served"
    assert "PinnerFormer, site's configuration has a vector for every pin of the index." in result.markdown
    assert rows["popularity, ever"]["minus_ours"]["all"][0] == pytest.approx(
        rows["popularity, ever"]["summary"]["recall_at_10"] - rows[OURS]["summary"]["recall_at_10"]
    )
    assert read_json(tmp_path / "out" / "table.json") == result.table
    assert (tmp_path / "out" / "table.md").read_text() == result.markdown
    assert "3 of 12 days are after the cut (by default, for a log of 12 days)." in result.markdown
    assert "quick (at most 5 minutes" in result.markdown
    assert "looks at the test users: docs/looks.csv" in result.markdown
    assert not (tmp_path / "data").exists()
    assert all(re.match(r"\[at most [45]:\d\d left\] ", message) for message in messages)
    [look] = read_looks(tmp_path / "looks.csv")
    assert (look["log"], look["seed"], look["commit"], look["budget"]) == ("shop", "0", "abc", "quick")
    assert PAPER not in look["contenders"]
    assert look["contenders"].startswith(f"{OURS}; {VECTOR}; ")


def test_peers_choose_their_settings_without_the_test_users(tmp_path: Path) -> None:
    bench(write_shop(tmp_path), tmp_path)
    assert len(TUNED_ON) == 4
    assert all(log.cut_ds < CUT_DS for log in TUNED_ON)
    first = read_looks(tmp_path / "looks.csv")
    bench(write_shop(tmp_path), tmp_path)
    assert len(read_looks(tmp_path / "looks.csv")) == len(first) + 1


def test_pin_features_that_cannot_be_built_leave_the_others(tmp_path: Path) -> None:
    pins = {"vectors": {"npy": "none.npy", "ids": "vector_ids.npy"}}
    source = shop_file(tmp_path)["source"] | {"pins": pins}
    rows = rows_of(bench(write_shop(tmp_path, source=source), tmp_path))
    for name in (OURS, VECTOR, *MEANS):
        assert "none.npy" in rows[name]["failure"]
    assert "minus_ours" not in rows["own frequency"]
    assert rows["own frequency"]["summary"]["recall_at_10"] > 0


def test_a_log_without_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER_S, "quick", 40)
    monkeypatch.setattr(run, "our_lists", our_lists)
    result = bench(write_shop(tmp_path, **without_vectors(tmp_path)), tmp_path)
    rows = rows_of(result)
    assert "| PinnerFormer, preset paper | no result: preset paper reads content vectors, and the site has none |" in (
        result.markdown
    )
    for name in MEANS:
        assert rows[name]["failure"] == "the site has no content vectors"
    assert "PinnerFormer, site's configuration has a vector for every pin of the index." in result.markdown
    assert rows[OURS]["num_unranked_pins"] == 0
    assert rows[OURS]["settings"]["memory"] is True
    assert rows[VECTOR]["note"] == "the same model without its memory"
    served, alone, ials = (rows[name]["summary"] for name in (OURS, VECTOR, "iALS (implicit)"))
    assert served["recall_at_10"] != alone["recall_at_10"]
    assert result.table["single_vector"] == [*MEANS, "iALS (implicit)"]
    [verdict] = [line for line in result.markdown.splitlines() if line.startswith("- **Vector alone**")]
    ratio = alone["recall_at_10"] / ials["recall_at_10"]
    assert f"All positives, recall@10 {alone['recall_at_10']:.4f}, {ratio:.2f} × iALS (implicit) (" in verdict


def test_towers_on_a_log_without_vectors_are_a_row_that_says_so(tmp_path: Path) -> None:
    changes = without_vectors(tmp_path, preset="tiny", changes={})
    rows = rows_of(bench(write_shop(tmp_path, **changes), tmp_path))
    for name in (OURS, VECTOR):
        assert rows[name]["failure"] == "preset tiny reads content vectors, and the site has none"


def test_a_log_without_repeats(tmp_path: Path) -> None:
    rows: list[Row] = [
        (user, f"p{(7 * user + 11 * day + step) % 60 + 60 * (user % 2):03d}", ds, 3600 * step)
        for user in range(NUM_USERS)
        for day, ds in enumerate(DAYS)
        for step in range(2)
    ]
    distinct = list({(user, pin): (user, pin, ds, second) for user, pin, ds, second in rows}.values())
    results = rows_of(bench(write_shop(tmp_path, distinct), tmp_path))
    assert results["own frequency"]["summary"]["recall_at_10"] == 0.0
    assert "summary" in results[OURS]


def test_fewer_pins_than_k(tmp_path: Path) -> None:
    rows = [(user, f"p{int(pin[1:]) % 6}", ds, second) for user, pin, ds, second in shop_actions()]
    results = rows_of(bench(write_shop(tmp_path, rows), tmp_path))
    assert results[OURS].get("failure") is None
    assert results[OURS]["summary"]["recall_at_10"] == pytest.approx(1.0)
    assert results["popularity, ever"]["summary"]["recall_at_50"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([row for row in shop_actions() if row[2] <= CUT_DS], "no action in the 3 days after the cut"),
        ([(5, pin, ds, second) for _, pin, ds, second in shop_actions()[:40]], "no test user"),
        ([], "no action in the 3 days after the cut"),
    ],
)
def test_a_log_that_cannot_be_asked_about_is_a_sentence(tmp_path: Path, rows: list[Row], complaint: str) -> None:
    with pytest.raises(PipelineError, match=complaint):
        bench(write_shop(tmp_path, rows), tmp_path)


def test_time_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.TOTAL_S, "quick", 0.0)
    rows = rows_of(bench(write_shop(tmp_path), tmp_path))
    assert {row["failure"] for row in rows.values()} == {"no time was left for it", "not part of --quick"}


def test_libraries_that_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(requirements: list[str], **options: Any) -> Path:
        raise PipelineError("pip said: no network")

    monkeypatch.setattr(run, "ensure_environment", refuse)
    rows = rows_of(bench(write_shop(tmp_path), tmp_path))
    assert rows["EASE"]["failure"] == "its libraries could not be installed: pip said: no network"
    assert "summary" in rows[OURS]


# The page


def test_a_section_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n\n<!-- benchmark shop -->\nold\n<!-- end of benchmark shop -->\n\n## Tail\n")
    publish_section(page, "shop", "new\ntable\n")
    assert page.read_text() == (
        "# Head\n\n<!-- benchmark shop -->\nnew\ntable\n<!-- end of benchmark shop -->\n\n## Tail\n"
    )
    publish_section(page, "other", "more")
    assert page.read_text().endswith("## Tail\n\n<!-- benchmark other -->\nmore\n<!-- end of benchmark other -->\n")
    page.write_text("<!-- end of benchmark shop -->\n<!-- benchmark shop -->\n")
    with pytest.raises(PipelineError, match="once, in this order"):
        publish_section(page, "shop", "new")
    with pytest.raises(PipelineError, match="no page at"):
        publish_section(tmp_path / "none.md", "shop", "new")
