"""Ids, action types, surfaces, interests and quarantined rows that try to act on a terminal or a page, through real
Dagster runs and `pf`: they are shown as they are, and nothing executes them."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pf_assets.cli import operations, releases
from pf_assets.cli.main import app
from pf_assets.definitions import build_definitions
from pf_assets.settings import REPOSITORY
from pf_core.config.site import QualityConfig, Site
from pf_core.printable import printable
from pf_core.serving.client import Serving
from tests.support.daily import NUM_USERS, snapshot
from tests.support.judging import with_types_of_log
from tests.support.stages import BUILT, DAILY, make_staged_site, run_stages

HOSTILE = [
    "\x1b[2J\x1b[31mcleared",
    "\x9b31mC1",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example/\x1b\\link",
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "![picture](http://evil.example/x.png)",
    "[bold red]markup[/bold red]",
    "javascript:alert(3)",
    "two\nlines\r\n- [ ] a list\n# a heading",
    "a|b|c",
    "`tick` *star* _line_",
    "\u202eesrever\u202c",
    "\u2028separator",
    "long " * 2000,
]

NOT_SHOWN = [char for text in HOSTILE for char in text if not char.isprintable() and char != "\n"]


def hostile(name: str, number: int) -> str:
    return HOSTILE[number] + name if number < len(HOSTILE) else f"{name}{number}"


def make_hostile_site(root: Path) -> Site:
    site = make_staged_site(root, id_type="string")
    words = [hostile(" type", number) for number in range(len(HOSTILE))]
    for path in root.glob("logs/*.parquet"):
        rows = pq.read_table(path).to_pydict()
        rows["user"] = [hostile("user", user) for user in rows["user"]]
        rows["pin"] = [hostile("pin", int(pin.removeprefix("p"))) for pin in rows["pin"]]
        rows["event"] = [words[number % len(words)] for number in range(len(rows["event"]))]
        rows["place"] = list(rows["event"])
        for number, text in enumerate(HOSTILE):  # each with a time that is none
            for name, value in {"user": text, "pin": text, "event": text, "place": text}.items():
                rows[name].append(value)
            rows["time_us"].append(None)
            rows["dwell_s"].append(float(number))
        pq.write_table(pa.table(rows), path)
    for path in root.glob("pins/*.parquet"):
        rows = pq.read_table(path).to_pydict()
        numbers = [int(pin.removeprefix("p")) for pin in rows["pin"]]
        rows["pin"] = [hostile("pin", number) for number in numbers]
        rows["topic"] = [HOSTILE[number % len(HOSTILE)] for number in numbers]
        if path.stem == BUILT[0]:
            rows["pin"] += [f"bad {text}" for text in HOSTILE]
            rows["vector"] += [[float("nan")] * 8 for _ in HOSTILE]
            rows["topic"] += HOSTILE
        topic = pa.array(rows["topic"], pa.string())
        vector = pa.array(rows["vector"], pa.list_(pa.float64()))
        pq.write_table(pa.table({"pin": pa.array(rows["pin"], pa.string()), "vector": vector, "topic": topic}), path)
    site = with_types_of_log(site, words)
    pins = site.source.pins.model_copy(update={"interest": "topic"})
    quality = QualityConfig(max_quarantined_share=1, min_volume_ratio=0, max_volume_ratio=100)
    return site.model_copy(update={"source": site.source.model_copy(update={"pins": pins}), "quality": quality})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_hostile_site(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture(scope="module")
def run(site: Site, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(site)
    result = dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.assets("raw_actions", "pin_features", "user_timelines", "training_set"),
        instance=instance,
        tags={"dagster/asset_partition_range_start": BUILT[0], "dagster/asset_partition_range_end": BUILT[-1]},
        raise_on_error=False,
    )
    assert result.success
    return result


def texts_of(value: Any) -> Iterator[str]:
    """Every text of a metadata value."""
    match value:
        case dg.TableMetadataValue():
            for record in value.records:
                yield from map(str, (*record.data.keys(), *record.data.values()))
        case dg.JsonMetadataValue():
            yield from texts_of(value.data)
        case dg.MetadataValue():
            yield str(value.value)
        case dict():
            for name, each in value.items():
                yield str(name)
                yield from texts_of(each)
        case list():
            for each in value:
                yield from texts_of(each)
        case _:
            yield str(value)


def test_pages_show_log_content_as_text(run: dg.ExecuteInProcessResult, instance: dg.DagsterInstance) -> None:
    found, markdown = [], []
    for event in run.get_asset_materialization_events():
        for value in event.materialization.metadata.values():
            found += list(texts_of(value))
            if isinstance(value, dg.MarkdownMetadataValue):
                markdown.append(str(value.value))
    for check in run.get_asset_check_evaluations():
        found += [check.description or "", *(text for value in check.metadata.values() for text in texts_of(value))]
    assert [text for text in found if not text.isprintable()] == []
    for text in markdown:
        assert text.startswith(("![", "`pf "))
        assert not any(content[:10] in text for content in HOSTILE)
    shown = "\n".join(found)
    for text in HOSTILE:  # in the quarantine's sample, the counts by type, the interests or the vocabularies
        assert printable(text, max_chars=60).removesuffix("…") in shown
    assert "long " * 50 not in shown


def test_logs_of_a_run_execute_nothing(run: dg.ExecuteInProcessResult, instance: dg.DagsterInstance) -> None:
    messages = "".join(entry.user_message for entry in instance.all_logs(run.run_id))
    assert not any(char in messages for char in NOT_SHOWN)


@pytest.fixture(scope="module")
def served(site: Site, run: dg.ExecuteInProcessResult) -> Site:
    run_stages(site, ["pinnerformer_model"])
    return run_stages(site, [name for name in DAILY if name not in ("raw_actions", "pin_features", "user_timelines")])


@pytest.fixture
def output(served: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command prints, with colors as on a terminal."""
    for module in (operations, releases):
        monkeypatch.setattr(module, "current_site", lambda: served)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), color=True)
        return result.output + (f"error: {result.exception}" if result.exception else "")

    return run


def is_harmless(text: str) -> bool:
    """Whether a text has no control characters but line ends and our own colors."""
    for ours in ("\x1b[1m", "\x1b[0m", "\x1b[31m\x1b[0m", "\x1b[33m", "\x1b[91m"):
        text = text.replace(ours, "")
    return all(char.isprintable() or char == "\n" for char in text)


def test_pf_shows_ids_and_interests(served: Site, output: Any) -> None:
    users = [user for user in snapshot(served, BUILT[-1]) if user not in map(str, range(NUM_USERS))]
    shown = ""
    for user in users[:20]:
        printed = output("recommend", "-k", "20", "--recent", "20", "--", user)
        assert is_harmless(printed), repr(printed)
        assert printable(user) in printed
        lines = printed.splitlines()
        assert sum(line.startswith("    ") for line in lines) == len(lines) - 3, "a line for each pin or action"
        shown += printed
    for pin in Serving(served).release().index.pin_ids.to_pylist()[:20]:
        printed = output("similar", "-k", "20", "--", pin)
        assert is_harmless(printed), repr(printed)
        assert len(printed.splitlines()) == 20
        shown += printed
    for text in HOSTILE:
        assert printable(text)[:40] in shown
    for arguments in (
        *(("recommend", "--", text) for text in HOSTILE),
        *(("similar", "--", text) for text in HOSTILE),
        ("releases",),
        ("status",),
        ("export", HOSTILE[0], "/nowhere"),
    ):
        assert is_harmless(output(*arguments)), arguments


def test_pf_check_shows_rows(site: Site, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(json.dumps(site.model_dump(mode="json")))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "site.json"), "--rows", "30"], color=True)
    assert is_harmless(result.output), repr(result.output)
    assert "\\x1b[2J" in result.output
    assert len(result.output) < 60_000


def test_commands_print_through_one_function() -> None:
    """JSON is of ASCII, with escapes; `pf forget` prints numbers and the path of its list."""
    calls = {}
    for path in (REPOSITORY / "pf_assets" / "cli").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
                if any(node.attr in ("echo", "secho") for node in attributes):
                    calls[path.stem, function.name] = function
    assert set(calls) <= {("output", "show"), ("output", "show_json"), ("operations", "forget")}
