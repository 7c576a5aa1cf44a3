"""What the benchmark exchanges with peers, its table, and the record of looks."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.benchmark.baselines import BASELINES
from pf_core.benchmark.files import read_lists, read_written_log, write_lists, write_log
from pf_core.benchmark.log import LIST_LENGTH, BenchmarkLog, RankedLists
from pf_core.benchmark.looks import append_look, read_looks
from pf_core.benchmark.markdown import COLUMNS, to_markdown
from pf_core.benchmark.scoring import ListScores, compare, score, summarize
from pf_core.benchmark.table import Contender, Run, make_table
from pf_core.errors import PipelineError
from tests.support.benchmark_logs import make_log, random_log

RUN = Run(
    command="pf benchmark random --quick",
    date="2026-07-01",
    seed=3,
    commit="abc1234",
    budget="quick",
    looks_file="docs/looks.csv",
)


# Files


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, pa.Array):
        return one.equals(other)
    return bool(one == other)


def test_a_log_for_tuning_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = BenchmarkLog(**{**random_log(1).__dict__, "notes": ("A note.",)})
    write_log(log, tmp_path, with_positives=True)
    read = read_written_log(tmp_path)
    for field in fields(log):
        one, other = getattr(log, field.name), getattr(read, field.name)
        pairs = [(getattr(one, each), getattr(other, each)) for each in ("user", "pin", "day", "is_positive")] if (
            field.name in ("train", "past")
        ) else [(one, other)]  # fmt: skip
        assert all(same(*pair) for pair in pairs), field.name


def test_the_files_of_a_log_without_its_positives(tmp_path: Path) -> None:
    log = random_log(1)
    write_log(log, tmp_path)
    assert not (tmp_path / "positives.parquet").exists()
    assert pq.read_table(tmp_path / "train.parquet").column_names == ["user", "pin", "day", "is_positive"]
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["num_pins"], meta["num_train_users"], meta["num_test_users"]) == (90, 40, 12)
    assert meta["list_length"] == LIST_LENGTH
    assert meta["num_seen"] == [len(set(log.past.pin[log.past.user == user].tolist())) for user in range(12)]
    read = read_written_log(tmp_path)
    assert (len(read.positive_user_P), int(read.num_unaskable_U.sum())) == (0, 0)


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no benchmark log in"):
        read_written_log(tmp_path)


@pytest.mark.parametrize("name", BASELINES)
def test_lists_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    log = random_log(2)
    lists = BASELINES[name](log)
    write_lists(lists, tmp_path / "lists.parquet")
    read = read_lists(tmp_path / "lists.parquet", log)
    for field in fields(lists):
        assert getattr(read, field.name).tolist() == getattr(lists, field.name).tolist()


GOOD = {"user": [0, 0, 2], "pin": [3, 4, 3], "score": [2.0, 1.0, 0.5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pin": [3, 90, 3]}, r"row 1 \(of 1 such rows\): the pin is not a row of the 90 pins"),
        ({"pin": [-1, 4, 3]}, "row 0 .*the pin is not a row"),
        ({"user": [0, 0, 12]}, "row 2 .*the user is not a row of the 12 test users"),
        ({"user": [0, 2, 0]}, "row 2 .*not sorted by user"),
        ({"score": [1.0, 2.0, 0.5]}, "row 1 .*do not descend"),
        ({"score": [2.0, float("nan"), 0.5]}, "row 1 .*not finite"),
        ({"score": [float("inf"), 1.0, 0.5]}, "row 0 .*not finite"),
        ({"score": [2.0, None, 0.5]}, "column score must have numbers"),
        ({"pin": ["3", "4", "3"]}, "column pin must have integers"),
        ({"pin": [4, 4, 3]}, "row 1 .*in the user's list twice"),
    ],
)
def test_lists_that_break_the_rules_are_refused(tmp_path: Path, change: dict[str, list[Any]], message: str) -> None:
    log, path = random_log(2), tmp_path / "lists.parquet"
    pq.write_table(pa.table(GOOD), path)
    assert read_lists(path, log).offsets_U.tolist() == [0, 2, 2, *[3] * 10]
    pq.write_table(pa.table(GOOD | change), path)
    with pytest.raises(PipelineError, match=message):
        read_lists(path, log)


def test_lists_without_a_column_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lists.parquet"
    with pytest.raises(PipelineError, match="the contender wrote no file"):
        read_lists(path, random_log(2))
    pq.write_table(pa.table({"user": [0], "item": [1]}), path)
    with pytest.raises(PipelineError, match=r"has the columns \['user', 'item'\]; write user, pin, score"):
        read_lists(path, random_log(2))


# The table


def test_the_table_has_a_row_for_each_contender(tmp_path: Path) -> None:
    log = BenchmarkLog(**{**random_log(1).__dict__, "notes": ("Half of the users were sampled.",)})
    ours, theirs = (score(log, BASELINES[name](log)) for name in ("own frequency", "popularity, ever"))
    contenders = [
        Contender(name="ours", scores=ours, seconds=12.34, actions_without_vector=0.25, positives_without_vector=0.5),
        Contender(name="popularity", scores=theirs, seconds=0.1, settings={"factors": 64}, note="A remark."),
        Contender(name="iALS", failure="could not\nbe installed | no network", seconds=3.0),
    ]
    table = make_table(log, contenders, run=RUN, ours="ours")
    assert json.loads(json.dumps(table, allow_nan=False)) == table
    num_unaskable = int(log.num_unaskable_U.sum())
    num_positives = len(log.positive_pin_P) + num_unaskable
    assert table["log"]["unaskable_share"] == num_unaskable / num_positives
    assert [row["name"] for row in table["rows"]] == ["ours", "popularity", "iALS"]
    assert table["rows"][1]["summary"]["recall_at_50"] == summarize(theirs)["recall_at_50"]
    difference = compare(theirs, ours)
    assert table["rows"][1]["minus_ours"]["all"] == [difference["all"].mean, *difference["all"].interval]
    assert table["rows"][1]["minus_ours"]["all"][0] == pytest.approx(
        summarize(theirs)["recall_at_10"] - summarize(ours)["recall_at_10"]
    )
    assert "minus_ours" not in table["rows"][0]

    text = to_markdown(table)
    lines = text.splitlines()
    assert lines[2].startswith(f"{num_unaskable / num_positives:.1%} of the positives ({num_unaskable} of")
    assert "ours has no vector for the pins of 50.0% of the positives and of 25.0% of the test users' actions." in text
    assert "Index `catalogue`: 90 pins, 6 of them without any action up to the cut (cold). 12 test users with" in text
    assert "Cut 2026-02-01, positives of the 7 days after it. `pf benchmark random --quick`, 2026-07-01" in text
    assert "seed 3, commit abc1234; looks at the test users: docs/looks.csv." in text
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert all(row.replace("\\|", "").count("|") == len(COLUMNS) + 1 for row in rows)
    summary = summarize(theirs)
    low, high = summary["recall_at_10_interval"]
    assert f"| popularity | {summary['recall_at_10']:.4f} ({low:.4f} to {high:.4f}) |" in text
    assert "| **ours** |" in text
    assert "| iALS | no result: could not be installed \\| no network |" in text
    assert "- Half of the users were sampled." in lines
    low, high = difference["all"].interval
    verdict = "worse" if low > 0 else "better" if high < 0 else "not distinguishable from it"
    ours_10 = summarize(ours)["recall_at_10"]
    assert (
        f"- **All positives, recall@10**: as served, ours has {ours_10:.4f}; the best of the others, popularity, has "
        f"{summary['recall_at_10']:.4f}: ours is {verdict}." in lines
    )
    low, high = compare(theirs, ours, k=50)["discovery"].interval
    verdict = "worse" if low > 0 else "better" if high < 0 else "not distinguishable from it"
    [discovery] = [line for line in lines if line.startswith("- **Discovery, recall@50**")]
    assert discovery.endswith(f"popularity, has {summary['discovery_at_50']:.4f}: ours is {verdict}.")
    assert "- Only 12 test users: small differences are decided by chance." in lines
    assert "- Only 90 pins: nearly all of them are among the first 50 of any list." in lines
    assert "- popularity: factors 64; A remark." in lines


def test_a_table_without_our_model_and_with_undefined_figures() -> None:
    log = make_log(num_pins=3, train=[(0, 0, -1, True)], past=[(0, 1, -1, True)], positives=[(0, 1)], num_unaskable=[0])
    scores = score(log, BASELINES["own frequency"](log))
    contenders = [
        Contender(name="ours", failure="ran out of its budget", seconds=60),
        Contender(name="own frequency", scores=scores, seconds=0),
    ]
    table = make_table(log, contenders, run=RUN, ours="ours")
    assert table["rows"][1]["summary"]["discovery_at_10"] is None
    assert "minus_ours" not in table["rows"][1]
    assert "| own frequency | 1.0000 (1.0000 to 1.0000) | 1.0000 | – | – | – | – | – | 0.0 |" in to_markdown(table)
    assert "0.0% of the positives (0 of 1)" in to_markdown(table)


def test_the_vector_alone_is_compared_with_the_best_single_vector_peer() -> None:
    """One user with three positives, pins 0 to 2; each contender lists some of them first."""
    positives = [(0, 0), (0, 1), (0, 2)]
    log = make_log(num_pins=70, train=[], past=[], positives=positives, num_unaskable=[0])

    def found(*pins: int) -> ListScores:
        listed = [*pins, *range(3 + len(pins), 13)]
        lists = RankedLists(
            offsets_U=np.array([0, 10]), pin=np.array(listed, np.int32), score=-np.arange(10, dtype=np.float64)
        )
        return score(log, lists)

    contenders = [
        Contender(name="ours", scores=found(0, 1, 2), seconds=1, num_unranked_pins=0),
        Contender(name="alone", scores=found(0), seconds=0),
        Contender(name="counts", scores=found(0, 1, 2), seconds=0),
        Contender(name="iALS", scores=found(1, 2), seconds=0),
        Contender(name="mean", scores=found(1), seconds=0),
    ]
    table = make_table(log, contenders, run=RUN, ours="ours", vector_alone="alone", single_vector=["mean", "iALS", "x"])
    assert table["single_vector"] == ["iALS", "mean"]
    assert (table["ours"], table["vector_alone"]) == ("ours", "alone")
    assert table["rows"][3]["minus_ours_at_50"]["all"] == [2 / 3 - 1] * 3
    lines = to_markdown(table).splitlines()
    assert "ours has a vector for every pin of the index." in lines
    for k in (10, 50):
        assert (
            f"- **All positives, recall@{k}**: as served, ours has 1.0000; the best of the others, counts, has 1.0000: "
            "ours is not distinguishable from it; the best single-vector peer, iALS, has 0.6667: ours is better."
        ) in lines
    [line] = [line for line in lines if line.startswith("- **Vector alone**")]
    assert line.startswith("- **Vector alone**: All positives, recall@10 0.3333, 0.50 × iALS (0.6667); ")
    assert (1 / 3) / (2 / 3) == 0.5
    without = to_markdown(make_table(log, contenders[:3], run=RUN, ours="ours", vector_alone="alone"))
    assert "There is no single-vector peer to compare it with." in without


def test_a_contender_has_scores_or_a_failure() -> None:
    with pytest.raises(AssertionError, match="either scores or a failure"):
        Contender(name="x", seconds=0)


# Looks


def look(path: Path, seed: int) -> None:
    append_look(
        path, date="2026-07-01", log='a "log", quoted', seed=seed, commit="abc", contenders=["x, y", "z"], budget="full"
    )


def test_looks_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "looks.csv"
    assert read_looks(path) == []
    look(path, 1)
    look(path, 2)
    assert path.read_text().splitlines()[0] == "date,log,seed,commit,contenders,budget"
    line = {"date": "2026-07-01", "log": 'a "log", quoted', "commit": "abc", "contenders": "x, y; z", "budget": "full"}
    assert read_looks(path) == [line | {"seed": "1"}, line | {"seed": "2"}]


def test_looks_written_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "looks.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: look(path, seed), range(40)))
    assert sorted(int(row["seed"]) for row in read_looks(path)) == list(range(40))
