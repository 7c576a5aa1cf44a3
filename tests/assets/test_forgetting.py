"""`pf forget` on whole sites: every file, Dagster's and MLflow's too, and the command line itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from pf_assets.assets.evaluation import evaluation_dir
from pf_assets.cli import operations
from pf_assets.cli.main import app
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.evaluation.scores import read_scores
from pf_core.logs.deletion_list import add_to_deletion_list, read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import bucket_files
from pf_core.serving.client import Serving
from pf_core.serving.releases import release_root
from pf_core.storage.locks import exclusive
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.accepted import copy_accepted, run_assets
from tests.support.daily import DailySites, day, make_daily_site, register_model, run, snapshot
from tests.support.judging import LAST
from tests.support.shared import SharedSites
from tests.support.sites import START
from tests.support.training_here import RUN_RANKS, run_rank_here

Use = Callable[[Site], None]


@pytest.fixture
def use(memory_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    """`pf` on a site; the Dagster runs that it starts are in this process."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "local"))

    def choose(site: Site) -> None:
        def materialize(assets: str, days: list[str], *, config: dict[str, Any] | None = None, **shown: Any) -> None:
            assert run(site, memory_instance, days[0], days[-1], assets=tuple(assets.split(",")), config=config).success

        monkeypatch.setattr(operations, "current_site", lambda: site)
        monkeypatch.setattr(operations, "materialize", materialize)

    return choose


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def pf(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def verified(*arguments: str) -> dict[str, Any]:
    """What `pf forget --verify --json` found, by place; the exit code says whether anything is overdue."""
    result = invoke("forget", "--verify", "--json", *arguments)
    found: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == (0 if found["is_forgotten"] else 1)
    return {place["name"]: place for place in found["places"]} | {"is_forgotten": found["is_forgotten"]}


def left(found: dict[str, Any]) -> dict[str, str]:
    return {
        name: place["state"] for name, place in found.items() if name != "is_forgotten" and place["state"] != "gone"
    }


# Every file


def test_in_the_end_no_file_has_the_user(
    shared_sites: SharedSites, memory_instance: dg.DagsterInstance, use: Use, tmp_path: Path
) -> None:
    """Not below the folders of the site's data and of MLflow: at once, or when retention has dropped the day."""
    kept = {"keep_releases": 2, "retention_days": 3}
    timelines = {"num_buckets": 2, "retention_days": 3}
    site = make_daily_site(tmp_path / "site", last=day(7), id_type="string", serving=kept, timelines=timelines)
    for ds in ds_range(START, day(7)):
        path = Path(site.source.root) / "logs" / f"{ds}.parquet"
        log = pq.read_table(path)
        names = [f"member-{user:02d}-of-the-site" for user in log["user"].to_pylist()]
        events = ["dance" if number % 97 == 5 else event for number, event in enumerate(log["event"].to_pylist())]
        log = log.set_column(log.schema.get_field_index("user"), "user", [names])
        pq.write_table(log.set_column(log.schema.get_field_index("event"), "event", [events]), path)
    site = site.model_copy(update={"quality": site.quality.model_copy(update={"max_quarantined_share": 0.5})})
    register_model(shared_sites.add_mlflow(site))
    assert run(site, memory_instance, START, day(2)).success
    use(site)
    user, stays = sorted(snapshot(site, day(2)))[:2]
    folders = [site.directory, Tracking(site).root, Tracking(site).artifacts]

    def files_with(text: str) -> set[str]:
        found = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        return {path.suffix for path in found if text.encode() in path.read_bytes()}

    assert files_with(user) >= {".parquet", ".lance", ".mdb"}
    pf("forget", user)
    assert ".parquet" not in files_with(user)
    found = verified(user)
    assert found["is_forgotten"]
    until = [place["until"] for name, place in found.items() if name.startswith("user_") and place["found"]]
    assert until
    assert all(each.startswith(day(4)) for each in until)
    assert run(site, memory_instance, day(3), day(5)).success
    assert files_with(user) == set()
    assert left(verified(user)).keys() == {"model that serves"}
    assert files_with(stays) >= {".parquet", ".lance", ".mdb"}


def train(site: Site, instance: dg.DagsterInstance, *assets: str, **config: Any) -> None:
    assert run_assets(site, instance, *assets, **config).success


@pytest.fixture
def evaluated(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return copy_accepted(shared_sites, tmp_path / "evaluated")


def test_training_remembers_until_the_next_one(
    evaluated: Site, use: Use, memory_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = evaluated
    use(site)
    monkeypatch.setattr(RUN_RANKS, run_rank_here)
    local, tracking = evaluation_dir(site) / "scores.parquet", Tracking(site)
    in_mlflow = list(tracking.artifact_folder.rglob("scores.parquet"))
    assert len(in_mlflow) == 1
    scored = read_scores(local)
    before = {path: path.read_bytes() for path in tracking.artifact_folder.rglob("model.*")}
    user = scored.user_ids[0].as_py()
    assert left(verified(str(user))).items() >= {("training sets", "left"), ("evaluations", "overdue")}
    pf("forget", str(user))
    for path in (local, *in_mlflow):
        scores = read_scores(path)
        assert scores.user_ids.to_pylist() == [None, *scored.user_ids.to_pylist()[1:]]
        assert scores.question == scored.question
    found = verified(str(user))
    assert found["is_forgotten"]
    assert {name for name in left(found) if "model" in name or "training" in name} == {
        "training sets",
        "model that serves",
        "other models",
    }
    served = tracking.served()
    assert served is not None
    assert found["model that serves"]["found"] == [
        f"{tracking.name} version {served.version} ({served.served_version})"
    ]
    num_models = len(found["other models"]["found"])
    assert {path: path.read_bytes() for path in before} == before  # a model is what it was, and says so

    train(site, memory_instance, "training_set", training_set={"cut_ds": LAST})
    assert user not in open_training_set(latest_training_set(site)).held_out.user_ids().to_pylist()
    train(site, memory_instance, "pinnerformer_model")
    tracking.promote(max(model.version for model in tracking.versions()), because="the next training")
    found = verified(str(user))
    assert found["training sets"]["state"] == found["model that serves"]["state"] == "gone"
    assert len(found["other models"]["found"]) == num_models + 1  # the one that served


def test_a_set_that_was_built_before_the_request_makes_a_model_that_remembers(
    evaluated: Site, use: Use, memory_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that counts is when the deletion list was read, not when the model was trained."""
    use(evaluated)
    monkeypatch.setattr(RUN_RANKS, run_rank_here)
    pf("forget", "7")
    train(evaluated, memory_instance, "pinnerformer_model", pinnerformer_model={"retrain": True})
    tracking = Tracking(evaluated)
    newest = tracking.versions()[0]
    read_at = datetime.fromisoformat(str(tracking.data_read_at(newest)))
    tracking.promote(newest.version, because="it is new")
    assert f"version {newest.version} " in verified("7")["model that serves"]["found"][0]
    line = json.loads(Path(str(evaluated.deletion_list)).read_text())
    for seconds, state in ((1, "left"), (-1, "gone")):
        line["since"] = (read_at + timedelta(seconds=seconds)).isoformat()
        Path(str(evaluated.deletion_list)).write_text(json.dumps(line))
        assert verified("7")["model that serves"]["state"] == state


def test_an_ingestion_that_began_before_the_request_does_not_bring_the_user_back(
    daily_sites: DailySites, memory_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = daily_sites.new()

    def with_a_request(*arguments: Any, **options: Any) -> Any:
        for manifest in ingest_days(*arguments, **options):
            add_to_deletion_list(site, [1, 2, 3])
            yield manifest

    monkeypatch.setattr("pf_assets.assets.logs.ingest_days", with_a_request)
    assert run(site, memory_instance, START, day(1), assets=("raw_actions",)).success
    for ds in (START, day(1)):
        columns = [pq.read_table(path)["user_id"].to_pylist() for path in bucket_files(site, ds).values()]
        users = {user for column in columns for user in column}
        assert users
        assert users.isdisjoint({1, 2, 3})
    assert {4, 5, 6, 7} & users


def test_pages_in_dagster_are_searched(
    daily_sites: DailySites, stored_instance: dg.DagsterInstance, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = daily_sites.new()
    actions = site.source.actions.model_copy(update={"path": "logs/{ds}.csv", "format": None})
    source = site.source.model_copy(update={"actions": actions})
    site = site.model_copy(
        update={"source": source, "quality": site.quality.model_copy(update={"max_quarantined_share": 1.0})}
    )
    rows = ["user,pin,time_us,event,place,dwell_s", "3,p1,1767225600000000,look,home,60", "41,p1", "4,p1,1767225600000"]
    (Path(site.source.root) / "logs" / f"{START}.csv").write_text("\n".join(rows))
    assert run(site, stored_instance, START, assets=("raw_actions",)).success
    use(site)
    monkeypatch.setenv("DAGSTER_HOME", stored_instance.root_directory)
    assert left(verified("41"))["quarantine"] == "overdue"
    pf("forget", "41", "1")
    found = verified("41")
    assert found["is_forgotten"]
    assert found["pages in Dagster"]["state"] == "left"
    assert found["pages in Dagster"]["found"][0].startswith(f"{START}, run ")
    assert verified("1")["pages in Dagster"]["state"] == "gone"  # 41 and p1 are others
    database = Path(stored_instance.root_directory, "history", "runs", "index.db")
    database.write_bytes(b"no database" * 1000)
    found = verified("41")
    assert not found["is_forgotten"]
    assert found["pages in Dagster"]["found"][0].startswith("they cannot be searched: ")


def test_logs_of_runs_are_searched(
    daily_sites: DailySites, use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(daily_sites.new())
    home = tmp_path / "home"
    (home / "logs").mkdir(parents=True)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    (home / "logs" / "pf-1.log").write_text("raw_actions: 12,345 users, 4711\nuser 1234567 is late\n")
    assert verified("1234567")["logs of runs"]["found"] == [str(home / "logs" / "pf-1.log")]
    assert verified("1234567")["logs of runs"]["state"] == "left"
    assert verified("123456")["logs of runs"]["state"] == "gone"
    assert verified("4711")["logs of runs"]["searched"].startswith("not searched: so short an id is a number")


def test_what_mlflow_keeps_is_unknown_when_it_is_away(daily_sites: DailySites, use: Use) -> None:
    site = daily_sites.new()
    use(site)
    (Tracking(site).root / "mlflow.db").write_bytes(b"no database" * 1000)
    found = verified("1")
    assert not found["is_forgotten"]
    assert found["MLflow"]["found"][0].startswith("it cannot be searched: ")


# The command


def test_a_later_stage_that_fails_says_how_to_finish(daily_sites: DailySites, use: Use) -> None:
    site = daily_sites.released_twice()
    use(site)
    user = min(snapshot(site, day(3)))
    with exclusive(release_root(site), "release"):
        with pytest.raises(PipelineError) as failed:
            invoke("forget", str(user))
    assert str(failed.value).startswith(
        "the users are on the deletion list, so they stay out of what is built from now"
    )
    assert "another run is writing release" in str(failed.value)
    assert failed.value.remedy == "to finish, run: pf forget"
    assert read_deletion_list(site).to_pylist() == [user]
    assert "to finish, run: pf forget" in invoke("forget", "--verify", str(user)).output
    pf("forget")
    assert verified(str(user))["is_forgotten"]
    assert not Serving(site).release().embeddings([user])[1].any()


def test_a_mistake_of_another_library_is_a_sentence(
    daily_sites: DailySites, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(daily_sites.new())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", "/data/small")

    monkeypatch.setattr(operations, "delete_users", fail)
    with pytest.raises(PipelineError, match=r"OSError: .*Read-only file system.*; to finish, run: pf forget"):
        invoke("forget", "3")


def test_timelines_that_are_newer_than_the_snapshot_lose_the_user_too(
    daily_sites: DailySites, memory_instance: dg.DagsterInstance, use: Use
) -> None:
    site = daily_sites.released_twice()
    assert run(site, memory_instance, day(4), assets=("raw_actions", "user_timelines")).success
    use(site)
    user = min(snapshot(site, day(3)))
    pf("forget", str(user))
    assert verified(str(user))["is_forgotten"]


def test_verify_prints_what_a_person_reads(daily_sites: DailySites, use: Use) -> None:
    site = daily_sites.released_twice()
    use(site)
    user = str(min(snapshot(site, day(3))))
    result = invoke("forget", "--verify", user)
    assert result.exit_code == 1
    assert result.output.startswith(f"user {user}: not on the deletion list\n")
    assert "to forget the user: pf forget USER" in result.output
    pf("forget", user)
    lines = pf("forget", "--verify", user).splitlines()
    assert lines[0].startswith(f"user {user}: on the deletion list since 20")
    assert lines[-1] == "nothing is left that should be gone by now"
    assert [line.split()[0] for line in lines if " user_timelines " in line] == ["left"]


@pytest.fixture
def strings(tmp_path: Path, use: Use) -> Site:
    """A site of string ids, on which nothing was built."""
    site = make_daily_site(tmp_path / "strings", last=day(1), id_type="string")
    use(site)
    return site


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-1", "5"], ["-1", "5"]),
        (["--", "--verify"], ["--verify"]),
        (["5", "-7", "--", "--json", "-8"], ["--json", "-7", "-8", "5"]),
        (["\u00e9", "e\u0301", "\x1b[2J", "a\nb", "007"], ["\x1b[2J", "007", "a\nb", "e\u0301", "\u00e9"]),
    ],
)
def test_ids_that_look_like_something_else(strings: Site, arguments: list[str], expected: list[str]) -> None:
    output = pf("forget", *arguments)
    assert read_deletion_list(strings).to_pylist() == expected
    assert output.replace("\n", "").isprintable()
    assert verified("--", expected[0])["is_forgotten"]
    shown = pf("forget", "--verify", "--", expected[0])
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--verfy", "5"], "No such option"),
        (["-x"], "No such option"),
    ],
)
def test_options_that_do_not_exist_are_no_ids(strings: Site, arguments: list[str], expected: str) -> None:
    result = invoke("forget", *arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert len(read_deletion_list(strings)) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--verify"], "--verify takes one user"),
        (["--verify", "1", "2"], "--verify takes one user"),
        (["--json", "1"], "--verify takes one user"),
        ([""], "has no user_id that is a text"),
    ],
)
def test_calls_that_are_refused_add_nobody(strings: Site, arguments: list[str], expected: str) -> None:
    with pytest.raises(PipelineError, match=expected):
        invoke("forget", *arguments)
    assert len(read_deletion_list(strings)) == 0


def test_a_very_long_id_is_shown_cut(strings: Site) -> None:
    user = "x" * 100_000
    assert len(pf("forget", user)) < 1000
    assert read_deletion_list(strings).to_pylist() == [user]
    assert max(map(len, pf("forget", "--verify", user).splitlines())) < 300


def test_four_requests_at_once_are_all_kept(tmp_path: Path) -> None:
    """Each in a process of its own, as four people call it."""
    site_file = tmp_path / "site.yaml"
    site_file.write_text(
        "name: small\nstart_ds: 2026-01-01\ndata_dir: data\ndeletion_list: forget.txt\n"
        "source:\n  root: .\n  actions: {path: 'logs/{ds}.csv', user_id: user, pin_id: pin, ts: {column: ts, unit: s},"
        " action_type: {constant: look}}\n  pins: {pin_id: pin}\n  positive: {action_types: [look], surfaces: null}\n"
    )
    (tmp_path / "forget.txt").write_text("1\n2")
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    environment = {**os.environ, "PF_SITE": str(site_file), "DAGSTER_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pf_assets.cli.main", "forget"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    calls = [subprocess.Popen([*command, user], env=environment, **pipes) for user in ("10", "20", "30", "40")]
    outputs = [call.communicate() for call in calls]
    assert [call.returncode for call in calls] == [0] * 4, outputs
    lines = (tmp_path / "forget.txt").read_text().splitlines()
    assert lines[:2] == ["1", "2"]
    assert sorted(json.loads(line)["user_id"] for line in lines[2:]) == [10, 20, 30, 40]
