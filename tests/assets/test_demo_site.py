"""The demo's site file: in a clone and installed from a wheel, on the newest days, kept once it is there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pf_assets import settings
from pf_assets.demo_site import open_demo
from pf_assets.settings import DEMO_SITE, INSTANCE_TEXT, current_site, demo_site_path, site_path
from pf_core.config.site import load_site
from pf_core.errors import PipelineError
from pf_core.world.config import demo, tiny
from pf_core.world.logs import write_logs

TODAY = "2026-11-19"
"""A Thursday; the demo's last day is a Tuesday."""


@pytest.fixture(autouse=True)
def _no_site_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PF_SITE", "DAGSTER_HOME", "PF_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the code installed from a wheel."""
    monkeypatch.setattr(settings, "EXPERIMENTS_SITE", tmp_path / "site-packages" / "experiments.yaml")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone; the packages are elsewhere, as the tests must not write to the real one."""
    home = tmp_path / "clone" / "dagster_home"
    (home / "experiments").mkdir(parents=True)
    (home / "experiments" / "experiments.yaml").touch()
    (tmp_path / "clone" / "pf_assets").mkdir()
    (tmp_path / "clone" / "pf_assets" / "demo.yaml").write_text(DEMO_SITE.read_text())
    monkeypatch.setattr(settings, "REPOSITORY", tmp_path / "clone")
    monkeypatch.setattr(settings, "EXPERIMENTS_SITE", home / "experiments" / "experiments.yaml")
    monkeypatch.setattr("pf_assets.demo_site.DEMO_SITE", tmp_path / "clone" / "pf_assets" / "demo.yaml")
    return tmp_path / "clone"


def test_installed_everything_is_below_the_current_folder(empty: Path) -> None:
    path, world = open_demo(TODAY)
    assert path == empty / "demo" / "site.yaml"
    site = load_site(path, environment={})
    assert (site.start_ds, site.end_ds) == ("2026-08-20", "2026-11-17") == (world.dates[0], world.dates[-1])
    for folder in (site.directory, site.log_root, Path(str(site.deletion_list))):
        assert folder.is_relative_to(empty / "demo" / "data")
    assert (empty / "demo" / "dagster.yaml").read_text() == INSTANCE_TEXT.read_text()
    assert settings.dagster_home() == str(empty / "demo")
    assert current_site() == site, "the other commands find it"
    example = load_site(DEMO_SITE, environment={})
    paths = {"start_ds", "end_ds", "data_dir", "deletion_list", "source"}
    assert site.model_dump(exclude=paths) == example.model_dump(exclude=paths)
    assert site.source.model_dump(exclude={"root"}) == example.source.model_dump(exclude={"root"})


def test_in_a_clone_the_data_is_where_it_was(clone: Path) -> None:
    path, _ = open_demo(TODAY)
    assert path == clone / "dagster_home" / "demo.yaml"
    site = load_site(path, environment={})
    assert site.directory == clone / "data" / "demo"
    assert site.log_root == clone / "data" / "demo_site"
    assert settings.dagster_home(path) == str(clone / "dagster_home")


@pytest.mark.parametrize("place", ["empty", "clone"])
def test_a_demo_that_is_there_keeps_its_days(place: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(place)
    path, world = open_demo(TODAY, "2026-04-01")
    assert world == demo()
    written = path.stat().st_mtime_ns
    assert open_demo(TODAY) == open_demo("2027-11-19") == open_demo(TODAY, "2026-04-06") == (path, demo())
    assert path.stat().st_mtime_ns == written
    with pytest.raises(PipelineError, match="ends on 2026-03-31, not on 2026-11-17: a demo keeps its days") as refused:
        open_demo(TODAY, "2026-11-18")
    assert ("make clean" in str(refused.value)) == (place == "clone")


def test_logs_that_are_there_keep_their_days(clone: Path) -> None:
    """A clone of an earlier version had a site file in git; its logs and data may be there."""
    write_logs(demo(), clone / "data" / "demo_site", file_format="csv.gz", days=[])
    assert open_demo(TODAY)[1] == demo()


def test_logs_of_another_world_do_not_decide(clone: Path) -> None:
    write_logs(tiny(), clone / "data" / "demo_site", file_format="csv.gz", days=[])
    assert open_demo(TODAY)[1].dates[-1] == "2026-11-17"


def test_a_day_that_is_not_over_is_refused(empty: Path) -> None:
    for until in (TODAY, "2027-01-01"):
        with pytest.raises(PipelineError, match=f"{until} is not over yet"):
            open_demo(TODAY, until)
    with pytest.raises(PipelineError, match="'yesterday' is not a day"):
        open_demo(TODAY, "yesterday")
    assert not (empty / "demo").exists()


def a_file(folder: Path) -> None:
    (folder / "demo").write_text("")


def a_thesis(folder: Path) -> None:
    (folder / "demo").mkdir()
    (folder / "demo" / "thesis.tex").write_text("")


@pytest.mark.parametrize("content", [a_file, a_thesis])
def test_a_folder_with_something_else_is_refused(empty: Path, content: Callable[[Path], None]) -> None:
    content(empty)
    before = sorted(empty.rglob("*"))
    with pytest.raises(PipelineError, match="where something else is"):
        open_demo(TODAY)
    assert sorted(empty.rglob("*")) == before


def test_an_interrupted_call_goes_on(empty: Path) -> None:
    (empty / "demo").mkdir()
    (empty / "demo" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    path, _ = open_demo(TODAY)
    assert path.is_file()
    assert (empty / "demo" / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"


@pytest.mark.parametrize("change", [("name: demo", "name: shop"), ("start_ds: 2026-08-20", "start_ds: 2026-08-21")])
def test_another_site_file_is_refused(empty: Path, change: tuple[str, str]) -> None:
    path, _ = open_demo(TODAY)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(PipelineError, match="is not the demo's site file"):
        open_demo(TODAY)


def test_a_folder_without_permission_is_a_sentence(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PipelineError, match="cannot be written to: Permission denied"):
        open_demo(TODAY)


def test_the_own_site_comes_before_the_demo(empty: Path) -> None:
    with pytest.raises(PipelineError, match=r"neither \./site\.yaml nor .*demo/site\.yaml") as refused:
        current_site()
    assert "pf init LOGS" in str(refused.value)
    open_demo(TODAY)
    assert site_path({}) == demo_site_path()
    (empty / "site.yaml").write_text(DEMO_SITE.read_text())
    assert site_path({}) == Path("site.yaml")
    assert site_path({"PF_SITE": "/elsewhere.yaml"}) == Path("/elsewhere.yaml")


def test_the_example_is_the_published_world() -> None:
    site = load_site(DEMO_SITE, environment={})
    assert (site.start_ds, site.end_ds) == (demo().dates[0], demo().dates[-1])
    with pytest.raises(PipelineError, match="is an example, and its folder is no Dagster home"):
        settings.dagster_home(DEMO_SITE)
