"""The rows of stages, on a terminal and elsewhere, fed with what Dagster's runs say."""

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from pf_assets.cli.run_log import Amount, Said
from pf_assets.cli.stage import SHOWN_LINES, Stage
from pf_assets.cli.stage_rows import StageRows, figures, visible
from pf_assets.cli.stages import KEPT_LOGS, LOGS, StagesView

RUN = "4f892d1a-32c4-4f82-acff-e06592772b2c"


def said(kind: str, step: str, text: str = "") -> tuple[str, Said]:
    return f"{kind} {step} {text}", Said(kind, run_id=RUN, step=step, text=text)


def feed(view: StagesView, *lines: tuple[str, Said], days: tuple[str, ...] = ()) -> None:
    for line, each in lines:
        view.receive(line, each, days=days)


def printed(text: str) -> tuple[str, Said]:
    """A line that a process of the run prints."""
    return text, Said("other", text=text)


def names_and_results(output: str) -> list[list[str]]:
    """The lines after the first, which names the log: stage, and result."""
    return [[line[:24].strip(), line[36:]] for line in output.splitlines()[1:]]


def results(name: str) -> str:
    return f"result of {name}"


# Without a terminal


def test_each_stage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions", "pin_features"], home=tmp_path, result_of=results) as view:
        view.start(["raw_actions", "pin_features"])
        feed(view, said("started", "raw_actions"), said("message", "raw_actions", "5 rows"))
        feed(view, said("succeeded", "raw_actions"))
        feed(view, said("started", "raw_actions_volume_is_normal"), said("succeeded", "raw_actions_volume_is_normal"))
        feed(view, said("started", "pin_features"), said("succeeded", "pin_features"))
        view.finish(is_good=True)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"full log: {view.log}"
    assert names_and_results(out) == [
        *(["raw_actions", "result of raw_actions"], ["pin_features", "result of pin_features"])
    ]
    assert "5 rows" not in out
    assert "5 rows" in view.log.read_text()


def test_checks_that_come_after_other_assets_do_not_print_a_stage_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StagesView(["pin_features", "user_timelines"], home=tmp_path, result_of=results) as view:
        for asset in ("pin_features", "user_timelines"):
            feed(view, said("started", asset), said("succeeded", asset))
        for check in ("pin_features_are_there", "user_timelines_are_sound"):
            feed(view, said("started", check), said("succeeded", check))
    assert [name for name, _ in names_and_results(capsys.readouterr().out)] == ["pin_features", "user_timelines"]


def test_two_assets_at_once_do_not_end_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["pin_embeddings", "user_embedding_snapshot"], home=tmp_path, result_of=results) as view:
        feed(view, said("started", "pin_embeddings"), said("started", "user_embedding_snapshot"))
        assert [stage.state for stage in view.stages.values()] == ["running", "running"]
        feed(view, said("succeeded", "user_embedding_snapshot"))
        assert [stage.state for stage in view.stages.values()] == ["running", "done"]
        feed(view, said("succeeded", "pin_embeddings"))
    assert len(names_and_results(capsys.readouterr().out)) == 2


def test_a_second_run_of_an_asset_is_a_second_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions"], home=tmp_path, result_of=results) as view:
        for _ in range(2):
            feed(view, said("started", "raw_actions"), said("succeeded", "raw_actions"))
            view.finish(is_good=True)
    assert len(names_and_results(capsys.readouterr().out)) == 2


def test_a_stage_that_fails_keeps_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions", "pin_features"], home=tmp_path, result_of=results) as view:
        feed(view, said("started", "raw_actions"))
        feed(view, *(said("message", "raw_actions", f"line {number}") for number in range(SHOWN_LINES)))
        feed(view, printed("rank 0 said something"), printed("nanobind: leaked 27 instances!"))
        feed(view, said("failed", "raw_actions"), printed("Traceback (most recent call last):"))
        feed(view, said("message", "raw_actions_volume_is_normal", "Dependencies failed. Not executing."))
        view.finish(is_good=False)
    assert view.last_lines() == [*(f"line {number}" for number in range(1, SHOWN_LINES)), "rank 0 said something"]
    assert names_and_results(capsys.readouterr().out) == [["raw_actions", "failed"]]
    assert "Traceback" in view.log.read_text()
    assert "nanobind" in view.log.read_text()


def test_a_check_that_fails_is_a_line_after_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions"], home=tmp_path, result_of=results) as view:
        feed(view, said("started", "raw_actions"), said("succeeded", "raw_actions"))
        feed(view, said("started", "raw_actions_volume_is_normal"), said("failed", "raw_actions_volume_is_normal"))
    out = names_and_results(capsys.readouterr().out)
    assert out == [["raw_actions", "result of raw_actions"], ["raw_actions", "failed"]]


def test_a_run_that_ends_before_its_first_step_fails_its_first_stage(tmp_path: Path) -> None:
    with StagesView(["raw_actions", "pin_features"], home=tmp_path) as view:
        view.start(["raw_actions", "pin_features"])
        feed(view, printed("ModuleNotFoundError: No module named 'x'"))
        view.finish(is_good=False)
    assert [stage.state for stage in view.stages.values()] == ["failed", "waiting"]
    assert view.last_lines() == ["ModuleNotFoundError: No module named 'x'"]


def test_an_interrupted_stage_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with StagesView(["raw_actions"], home=tmp_path, result_of=results) as view:
            feed(view, said("started", "raw_actions"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names_and_results(capsys.readouterr().out) == [["raw_actions", "interrupted"]]


def test_rows_that_are_runs_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `pf ablations` has them: the step of both runs is ablation_runs."""
    with StagesView(["next_action", "sasrec"], home=tmp_path, result_of=results) as view:
        for row in ("next_action", "sasrec"):
            view.start(["ablation_runs"], row=row)
            line, each = said("message", "ablation_runs", f"step 5 of 10 of {row}")
            view.receive(line, each, row=row)
        assert [stage.amount for stage in view.stages.values()] == [Amount(5, 10, "steps")] * 2
        view.finish(is_good=False, row="sasrec")
        view.finish(is_good=True, row="next_action")
    assert view.last_lines("sasrec") == ["step 5 of 10 of sasrec"]
    assert view.last_lines("next_action") == []
    assert names_and_results(capsys.readouterr().out) == [
        *(["sasrec", "failed"], ["next_action", "result of next_action"])
    ]


def test_verbose_prints_the_log_instead_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions"], home=tmp_path, verbose=True, result_of=results) as view:
        feed(view, said("started", "raw_actions"), said("message", "raw_actions", "5 \x1b[31mrows"))
        feed(view, printed("nanobind: leaked 27 instances!"), said("succeeded", "raw_actions"))
    out = capsys.readouterr().out
    assert "message raw_actions 5 \\x1b[31mrows" in out
    assert "result of" not in out
    assert "nanobind" not in out


def test_lines_go_to_standard_error_if_the_output_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StagesView(["raw_actions"], home=tmp_path, result_of=results, to_stderr=True) as view:
        feed(view, said("started", "raw_actions"), said("succeeded", "raw_actions"))
        view.say("something")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [name for name, _ in names_and_results(captured.err)] == ["raw_actions", "something"]


def test_only_the_newest_logs_are_kept(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    for number in range(KEPT_LOGS + 5):
        (tmp_path / LOGS / f"pf-20200101-0000{number:02}-1.log").touch()
    (tmp_path / LOGS / "mine.log").touch()
    with StagesView(["raw_actions"], home=tmp_path) as view:
        pass
    kept = sorted(path.name for path in (tmp_path / LOGS).glob("pf-*"))
    assert len(kept) == KEPT_LOGS
    assert kept[-1] == view.log.name
    assert (tmp_path / LOGS / "mine.log").exists()


# On a terminal


def drawn(rows: StageRows, width: int, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=False)
    console.print(rows)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def running(name: str, done: int, total: int, *, for_s: float = 10.0, begun_at: int = 0) -> Stage:
    started = time.monotonic() - for_s
    amount = Amount(done, total, "steps")
    return Stage(name, "running", started=started, amount=amount, first=(begun_at, started), text="step")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_rows_have_bars_rates_and_the_time_left(width: int) -> None:
    stages = [Stage("raw_actions", "done", seconds=200.0, text="x" * 200), running("pinnerformer_model", 50, 200)]
    stages += [Stage("user_embedding_snapshot")]
    lines = drawn(StageRows({stage.name: stage for stage in stages}, lambda stages: 90.0), width)
    assert [line[:1] for line in lines[:1]] == ["✓"]
    assert lines[0].startswith("✓ raw_actions")
    assert "…" in lines[0]
    assert lines[0].endswith("3 min 20 s")
    assert "50 of 200 steps, 5/s, 30 s left" in lines[1]
    assert lines[1].endswith("10 s")
    assert "━" in lines[1]
    assert lines[2].split() == ["·", "user_embedding_snapshot"]
    assert lines[3] == "  about 2 min left"
    assert max(map(len, lines)) <= width


def test_a_stage_that_does_not_say_how_far_it_is_shows_its_last_message() -> None:
    stage = Stage("release", "running", started=time.monotonic(), text="verifying \x1b[31mthe store")
    (line,) = drawn(StageRows({"release": stage}), 100)
    assert "verifying \\x1b[31mthe store" in line


def test_only_what_has_room_is_drawn_until_the_end() -> None:
    names = [f"recipe_{number}" for number in range(50)]
    stages = {name: Stage(name, "done" if number < 20 else "waiting") for number, name in enumerate(names)}
    stages["recipe_20"].state = "running"
    rows = StageRows(stages)
    lines = drawn(rows, 80, height=13)
    assert len(lines) == 13 - 3 + 1
    assert "recipe_20" in "".join(lines)
    assert lines[-1] == "  20 of 50 are done"
    rows.is_over = True
    assert len([line for line in drawn(rows, 80, height=13) if "recipe_" in line]) == 50


def test_what_is_at_work_is_drawn_first_then_what_waits() -> None:
    stages = [Stage("a", "done"), Stage("b", "done"), Stage("c", "running"), Stage("d"), Stage("e")]
    assert [stage.name for stage in visible(stages, 1)] == ["c"]
    assert [stage.name for stage in visible(stages, 3)] == ["c", "d", "e"]
    assert [stage.name for stage in visible(stages, 4)] == ["b", "c", "d", "e"]


def test_a_rate_needs_two_amounts_and_a_second() -> None:
    assert figures(running("x", 50, 200)) == "50 of 200 steps, 5/s, 30 s left"
    assert figures(running("x", 50, 200, for_s=0.5)) == "50 of 200 steps"
    assert figures(running("x", 50, 200, begun_at=50)) == "50 of 200 steps"
    assert figures(running("x", 150, 200, begun_at=100)) == "150 of 200 steps, 5/s, 10 s left"
    assert figures(Stage("x")) == ""


def test_a_terminal_gets_rows_that_are_drawn_again(tmp_path: Path) -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    days = ("2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04")
    with StagesView(
        ["raw_actions", "release"], home=tmp_path, result_of=results, console=console, there=["release"]
    ) as view:
        assert view.stages["release"].text == "result of release", "it is there, and is not run"
        feed(view, said("started", "raw_actions"), said("message", "raw_actions", "2026-03-03: 5 rows"), days=days)
        assert view.stages["raw_actions"].amount == Amount(3, 4, "days")
        feed(view, said("message", "raw_actions", "2026-03-02: 5 rows"), days=days)
        assert view.stages["raw_actions"].amount == Amount(3, 4, "days"), "a bar does not go back"
        feed(view, said("succeeded", "raw_actions"))
    assert isinstance(console.file, io.StringIO)
    assert "✓" in console.file.getvalue()
    assert "result of raw_actions" in console.file.getvalue()


@pytest.mark.parametrize("until", [lambda view: view.start(["unknown"]), lambda view: feed(view, said("started", "x"))])
def test_an_asset_without_a_row_is_not_shown(until: Callable[[StagesView], None], tmp_path: Path) -> None:
    with StagesView(["raw_actions"], home=tmp_path) as view:
        until(view)
        view.finish(is_good=True)
    assert view.stages["raw_actions"].state == "waiting"
