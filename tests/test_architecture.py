"""The layering rule of docs/architecture.md: which folder of pf_core may import which."""

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

FOUNDATION = frozenset({"root", "config", "storage"})
DATA = FOUNDATION | {"engine", "logs"}
SHARED = DATA | {"pins", "timelines", "model", "metrics"}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "root": frozenset(),
    "storage": frozenset({"root"}),
    "config": frozenset({"root", "storage"}),
    "engine": FOUNDATION,
    "logs": FOUNDATION | {"engine"},
    "pins": DATA,
    "timelines": DATA,
    "metrics": frozenset({"root"}),
    "model": FOUNDATION | {"timelines"},
    "training": SHARED,
    "evaluation": SHARED | {"training"},
    "experiments": SHARED | {"training", "evaluation"},
    "onboarding": SHARED | {"training"},
    "benchmark": SHARED | {"training", "evaluation"},
    "embeddings": SHARED,
    "serving": SHARED | {"embeddings"},
    "operations": SHARED | {"embeddings", "serving"},
    "world": frozenset(),
}
"""For each folder of pf_core, the other folders that it may import; `root` stands for the modules beside them."""

KNOWS_NO_SITE = ("model", "metrics")
"""Folders that never import pf_core.config.site, not even through another module."""

OUTSIDE = {
    "pf_core": set(
        "annotated_types botocore duckdb hnswlib lance lmdb numpy pandas pyarrow pydantic pydantic_core".split()
        + "pyspark redis safetensors scipy sklearn torch upath yaml".split()
    ),
    "pf_core/world": {"numpy", "pyarrow"},
    "pf_assets": set("dagster dagster_pipes jinja2 matplotlib mlflow rich sqlalchemy typer".split()),
}
"""The libraries that each package may import, besides the standard library."""

SITTING_LINES = 350

PEER_SCRIPTS = REPOSITORY / "pf_core/benchmark/peers/scripts"
"""Programs for other environments, not modules of ours; tests/benchmark/test_peer_scripts.py checks their imports."""


def modules_of(package: Path) -> Iterator[Path]:
    yield from (path for path in sorted(package.rglob("*.py")) if PEER_SCRIPTS not in path.parents)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def floor_of(core: Path, path: Path) -> str:
    parts = path.relative_to(core).parts
    return parts[0] if len(parts) > 1 else "root"


def is_module(core: Path, name: str) -> bool:
    return (core.parent / Path(*name.split("."))).with_suffix(".py").exists()


def violations(core: Path) -> list[str]:
    """One sentence for each import in pf_core that the rule forbids."""
    found = []
    for path in modules_of(core):
        floor = floor_of(core, path)
        for module in sorted(imports_of(path)):
            if module.startswith("pf_assets"):
                found.append(f"{path.relative_to(core.parent)} imports {module}")
            if not module.startswith("pf_core.") or not is_module(core, module):
                continue
            target = floor_of(core, core / Path(*module.split(".")[1:]).with_suffix(".py"))
            if target != floor and target not in MAY_IMPORT[floor]:
                found.append(f"{path.relative_to(core.parent)} ({floor}) imports {module} ({target})")
    return found


def test_folders_import_only_the_floors_below() -> None:
    core = REPOSITORY / "pf_core"
    folders = {path.name for path in core.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders | {"root"} == MAY_IMPORT.keys()
    assert violations(core) == []


@pytest.mark.parametrize(
    ("folder", "shared"),
    [
        ("model/parts", {"pf_core.model.towers"}),
        ("training/parts", {f"pf_core.training.{name}" for name in ("optimizer", "ranks", "training_set")}),
    ],
)
def test_the_parts_share_little_with_the_towers(folder: str, shared: set[str]) -> None:
    """The parts folders import, of their own floor, themselves and what both families of models need."""
    core = REPOSITORY / "pf_core"
    own, floor = f"pf_core.{folder.replace('/', '.')}.", f"pf_core.{folder.split('/')[0]}."
    found = {
        module
        for path in modules_of(core / folder)
        for module in imports_of(path)
        if module.startswith(floor) and not module.startswith(own) and is_module(core, module)
    }
    assert found == shared


def test_a_planted_violation_is_found(tmp_path: Path) -> None:
    core = tmp_path / "pf_core"
    for name in ("serving/client.py", "training/loss.py", "storage/files.py"):
        (core / name).parent.mkdir(parents=True, exist_ok=True)
        (core / name).touch()
    (core / "serving/client.py").write_text("def search() -> None:\n    from pf_core.training.loss import x\n")
    (core / "storage/files.py").write_text("from pf_core.serving import client\n")
    assert violations(core) == [
        "pf_core/serving/client.py (serving) imports pf_core.training.loss (training)",
        "pf_core/storage/files.py (storage) imports pf_core.serving.client (serving)",
    ]


def test_the_wings_stand_apart() -> None:
    training, serving = {"training", "evaluation", "experiments"}, {"embeddings", "serving", "operations"}
    assert all(not MAY_IMPORT[floor] & training for floor in serving)
    assert all(not MAY_IMPORT[floor] & serving for floor in training)


@pytest.mark.parametrize("floor", KNOWS_NO_SITE)
def test_model_and_metrics_know_no_site(floor: str) -> None:
    core = REPOSITORY / "pf_core"
    seen: set[str] = set()
    queue = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in modules_of(core / floor)
        if path.name != "__init__.py"
    ]
    while queue:
        module = queue.pop()
        if module in seen:
            continue
        seen.add(module)
        path = (REPOSITORY / Path(*module.split("."))).with_suffix(".py")
        queue += [name for name in imports_of(path) if name.startswith("pf_core.") and is_module(core, name)]
    assert len(seen) > 2
    assert "pf_core.config.site" not in seen


def test_folders_say_what_lives_in_them() -> None:
    for package in ("pf_core", "pf_assets"):
        for path in (REPOSITORY / package).rglob("__init__.py"):
            tree = ast.parse(path.read_text())
            assert len(ast.get_docstring(tree) or "") > 40, path
            assert len(tree.body) == 1, f"{path}: an __init__ has a docstring and nothing else"


@pytest.mark.parametrize("package", OUTSIDE)
def test_outside_imports_are_on_the_list(package: str) -> None:
    for path in modules_of(REPOSITORY / package):
        roots = {module.split(".")[0] for module in imports_of(path)}
        foreign = roots - set(sys.stdlib_module_names) - {"pf_core", "pf_assets"}
        assert foreign <= OUTSIDE[package], path


def test_the_core_needs_no_orchestrator() -> None:
    names = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in modules_of(REPOSITORY / "pf_core")
        if path.name != "__init__.py"
    ]
    code = f"import sys, {', '.join(names)}; print('dagster' in sys.modules, 'mlflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_assets_have_no_postponed_annotations() -> None:
    for path in modules_of(REPOSITORY / "pf_assets"):
        assert "from __future__" not in path.read_text(), f"{path}: dagster reads the annotations of context and config"


def test_long_files_are_pointed_out() -> None:
    """A warning, not a failure: a file is split by idea, never by size alone."""
    for package in ("pf_core", "pf_assets", "benchmarks"):
        for path in modules_of(REPOSITORY / package):
            num_lines = len(path.read_text().splitlines())
            if num_lines > SITTING_LINES:
                with warnings.catch_warnings():
                    warnings.simplefilter("always")
                    warnings.warn(f"{path.relative_to(REPOSITORY)} has {num_lines} lines", stacklevel=1)


def test_ci_runs_the_readmes_test_command() -> None:
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert "make test" in lines
