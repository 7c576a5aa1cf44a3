"""The benchmark's table as Markdown, made of its JSON (`table.py`), so that both have the same figures.

A figure that is not defined is a dash.
"""

from collections.abc import Sequence
from typing import Literal, cast

from pf_core.benchmark.table import Row, Table
from pf_core.evaluation.manifest import QuestionName

COLUMNS = (
    "contender",
    "recall@10 (95 %)",
    "recall@50",
    "discovery@10 (95 %)",
    "discovery@50",
    "cold@10",
    "recall@10 minus ours (95 %, paired)",
    "discovery@10 minus ours",
    "seconds",
)

FEW_USERS, FEW_PINS = 100, 100
"""Below these numbers of test users and pins, the table says that it decides little."""


def to_markdown(table: Table) -> str:
    """Return the table with its head above it, and settings and notes below it."""
    lines = [f"### {table['log']['name']}", "", *_head(table), "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(_cells(row, is_ours=row["name"] == table["ours"])) for row in table["rows"]]
    lines += ["", *_verdicts(table)]
    below = [f"- {note}" for note in table["log"]["notes"]]
    for row in table["rows"]:
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        remarks = "; ".join(part for part in (settings, row["note"].rstrip(".")) if part)
        below += [f"- {row['name']}: {remarks}."] if remarks else []
    return "\n".join([*lines, *([""] if below else []), *below]) + "\n"


Metric = Literal["recall_at_10", "recall_at_50", "discovery_at_10", "discovery_at_50"]

ASKED: tuple[tuple[str, Metric, QuestionName, Literal[10, 50]], ...] = (
    ("All positives, recall@10", "recall_at_10", "all", 10),
    ("All positives, recall@50", "recall_at_50", "all", 50),
    ("Discovery, recall@10", "discovery_at_10", "discovery", 10),
    ("Discovery, recall@50", "discovery_at_50", "discovery", 50),
)
"""Label, metric, question and k of each verdict."""


def _verdicts(table: Table) -> list[str]:
    """Return the sentences below the table: our model as served and its vector alone against the best of the others."""
    ours, vector = (_row_of(table, name) for name in (table["ours"], table.get("vector_alone")))
    others = [row for row in table["rows"] if row is not ours and row is not vector]
    single = [row for row in others if row["name"] in table.get("single_vector", [])]
    lines = []
    for label, metric, question, k in ASKED:
        sentences = [_against("the best of the others", others, ours, metric, question, k)]
        if question == "all":
            sentences.append(_against("the best single-vector peer", single, ours, metric, question, k))
        text = "; ".join(sentence for sentence in sentences if sentence)
        value = None if ours is None or "summary" not in ours else ours["summary"][metric]
        has = "" if value is None else f"as served, ours has {_number(value)}; "
        lines += [f"- **{label}**: {has}{text}."] if text else []
    lines += _vector_verdict(vector, single)
    if table["log"]["num_test_users"] < FEW_USERS:
        lines.append(f"- Only {table['log']['num_test_users']} test users: small differences are decided by chance.")
    if table["log"]["num_pins"] <= FEW_PINS:
        lines.append(f"- Only {table['log']['num_pins']} pins: nearly all of them are among the first 50 of any list.")
    return lines


def _row_of(table: Table, name: str | None) -> Row | None:
    return next((row for row in table["rows"] if row["name"] == name), None)


def _best(rows: Sequence[Row], metric: Metric) -> Row | None:
    """Return the row with the highest figure; None if no row has one."""
    known = [row for row in rows if "summary" in row and row["summary"][metric] is not None]
    return max(known, key=lambda row: row["summary"][metric], default=None)


def _against(
    what: str, others: Sequence[Row], ours: Row | None, metric: Metric, question: QuestionName, k: Literal[10, 50]
) -> str:
    """Return who is best among others, and whether ours is better or worse by more than the paired interval."""
    best = _best(others, metric)
    if best is None:
        return ""
    sentence = f"{what}, {best['name']}, has {_number(best['summary'][metric])}"
    differences = best.get("minus_ours", {}) if k == 10 else best.get("minus_ours_at_50", {})
    difference = differences.get(question)
    if ours is None or difference is None or None in difference:
        return sentence
    _, low, high = cast("list[float]", difference)
    verdict = "worse" if low > 0 else "better" if high < 0 else "not distinguishable from it"
    return f"{sentence}: ours is {verdict}"


def _vector_verdict(vector: Row | None, single: Sequence[Row]) -> list[str]:
    """Return the sentence about the vector alone: its figures, and their ratio to the best single-vector peer's."""
    if vector is None or "summary" not in vector:
        return []
    parts = []
    for label, metric, _, _ in ASKED:
        value, best = vector["summary"][metric], _best(single, metric)
        if value is None:
            continue
        parts.append(f"{label} {_number(value)}")
        if best is not None and best["summary"][metric]:
            ratio = value / best["summary"][metric]
            parts[-1] += f", {ratio:.2f} × {best['name']} ({_number(best['summary'][metric])})"
    few = "" if single else " There is no single-vector peer to compare it with."
    return [f"- **Vector alone**: {'; '.join(parts)}.{few}"] if parts else []


def _head(table: Table) -> list[str]:
    log, run = table["log"], table["run"]
    lines = [
        f"{_percent(log['unaskable_share'])} of the positives ({log['num_unaskable']:,} of {log['num_positives']:,}) "
        "are on pins that are not in the index: they are misses."
    ]
    for row in table["rows"]:
        if row.get("num_unranked_pins") == 0:
            lines.append(f"{row['name']} has a vector for every pin of the index.")
        elif "actions_without_vector" in row or "positives_without_vector" in row:
            lines.append(
                f"{row['name']} has no vector for the pins of {_percent(row.get('positives_without_vector'))} of the "
                f"positives and of {_percent(row.get('actions_without_vector'))} of the test users' actions."
            )
    summaries = {row["name"]: row["summary"] for row in table["rows"] if "summary" in row}
    if table["ours"] in summaries:
        askable = _number(summaries[table["ours"]]["askable_recall_at_10"])
        lines.append(f"Without the positives that are not in the index, {table['ours']} has recall@10 {askable}.")
    num_cold = max((summary["num_cold"] for summary in summaries.values()), default=0)
    lines += [
        f"Index `{log['index']}`: {log['num_pins']:,} pins, {log['num_cold_pins']:,} of them without any action up to "
        f"the cut (cold). {log['num_test_users']:,} test users with {log['num_positives']:,} positives ({num_cold:,} "
        f"cold); {log['num_train_users']:,} training users with {log['num_train_actions']:,} actions.",
        f"Cut {log['cut_ds']}, positives of the {log['num_days']} days after it. `{run['command']}`, {run['date']}, "
        f"budget {run['budget']}, seed {run['seed']}, commit {run['commit']}; looks at the test users: "
        f"{run['looks_file']}.",
    ]
    return [line for pair in ((line, "") for line in lines) for line in pair][:-1]


def _cells(row: Row, *, is_ours: bool) -> list[str]:
    name = f"**{row['name']}**" if is_ours else row["name"]
    seconds = f"{row['seconds']:,.1f}"
    if "failure" in row:
        reason = " ".join(row["failure"].split())
        return [name, f"no result: {reason}", *[""] * (len(COLUMNS) - 3), seconds]
    summary, differences = row["summary"], row.get("minus_ours", {})
    return [
        name,
        _interval([summary["recall_at_10"], *summary["recall_at_10_interval"]]),
        _number(summary["recall_at_50"]),
        _interval([summary["discovery_at_10"], *summary["discovery_at_10_interval"]]),
        _number(summary["discovery_at_50"]),
        _number(summary["cold_at_10"]),
        _interval(differences.get("all"), sign="+"),
        _interval(differences.get("discovery"), sign="+"),
        seconds,
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None, *, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.4f}"


def _interval(values: Sequence[float | None] | None, *, sign: str = "") -> str:
    """Format a value and the two ends of its interval."""
    if values is None or values[0] is None:
        return "–"
    value, low, high = (_number(each, sign=sign) for each in values)
    return f"{value} ({low} to {high})"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
