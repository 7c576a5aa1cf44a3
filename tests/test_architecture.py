"""The shape of the code: who may import whom, and what the README promises exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

STAGES = [
    *(
        "contracts",
        "storage",
        "copies",
        "lease",
        "atomic",
        "source",
        "hyperparameters",
        "serving_config",
        "site",
        "reading",
        "mapping",
        "shuffle",
        "engine",
        "spark_engine",
    ),
    *(
        "quarantine",
        "raw_actions",
        "routing",
        "publication",
        "ingest",
        "coengagement",
        "catalogue",
        "state",
        "pin_features",
        "assembly",
    ),
    *(
        "pieces",
        "timelines",
        "audit",
        "quality",
        "pin_lookup",
        "packing",
        "training_set",
        "content_noise",
        "objectives",
        "model",
        "batches",
        "ranks",
        "sketch",
    ),
    *("loss", "search", "recall", "validation", "checkpoint", "trainer", "scores", "diversity", "evaluation"),
    *(
        "baselines",
        "pinnersage",
        "contenders",
        "protocol",
        "novelty",
        "promotion",
        "experiment",
        "recipes",
        "measures",
        "claims",
    ),
    *("ablation_claims", "paper_claims", "tables", "paper_results", "verdicts", "inference_cost"),
    *(
        "embeddings",
        "inference",
        "embedding_plan",
        "user_embeddings",
        "snapshot",
        "pin_embeddings",
        "pin_index",
        "index_build",
    ),
    *(
        "store",
        "redis_store",
        "pointer",
        "loading",
        "release",
        "serving",
        "repair",
        "status",
        "serving_checks",
        "export",
    ),
]
"""pf_core in reading order: a module imports only modules before it. `world` stands apart: it is another site."""

ALLOWED = {
    "pf_core": {
        "botocore",
        "duckdb",
        "hnswlib",
        "lance",
        "lmdb",
        "numpy",
        "pyarrow",
        "pydantic",
        "pyspark",
        "redis",
        "safetensors",
        "scipy",
        "torch",
        "upath",
        "yaml",
    },
    "pf_core/world": {"numpy", "pyarrow"},
    "pf_assets": {"dagster", "dagster_pipes", "jinja2", "matplotlib", "mlflow", "sqlalchemy", "typer"},
}


def imports_of(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("package", ALLOWED)
def test_outside_imports_are_on_the_list(package: str) -> None:
    for path in (REPOSITORY / package).glob("*.py"):
        roots = {module.split(".")[0] for module in imports_of(path)}
        foreign = roots - set(sys.stdlib_module_names) - {"pf_core", "pf_assets"}
        assert foreign <= ALLOWED[package], path


def test_a_stage_imports_only_stages_before_it() -> None:
    present = {path.stem for path in (REPOSITORY / "pf_core").glob("*.py")} - {"__init__"}
    assert present == set(STAGES)
    for position, stage in enumerate(STAGES):
        for module in imports_of(REPOSITORY / "pf_core" / f"{stage}.py"):
            if module.startswith("pf_"):
                assert module.startswith("pf_core."), f"{stage} imports {module}"
                assert module.split(".")[1] in STAGES[:position], f"{stage} imports {module}, which comes later"


def test_the_world_knows_nothing_of_the_pipeline() -> None:
    for path in (REPOSITORY / "pf_core" / "world").glob("*.py"):
        ours = {module for module in imports_of(path) if module.startswith("pf_")}
        assert all(module.startswith("pf_core.world") for module in ours), path


def test_the_core_needs_no_orchestrator() -> None:
    modules = ", ".join(f"pf_core.{stage}" for stage in STAGES)
    code = f"import sys, {modules}, pf_core.world.logs; print('dagster' in sys.modules, 'mlflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_assets_have_no_postponed_annotations() -> None:
    for path in (REPOSITORY / "pf_assets").glob("*.py"):
        assert "from __future__" not in path.read_text(), f"{path}: dagster reads the annotations of context and config"


def test_files_fit_one_sitting() -> None:
    for package in ("pf_core", "pf_assets", "benchmarks"):
        for path in (REPOSITORY / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 350, path


README = (REPOSITORY / "README.md").read_text() if (REPOSITORY / "README.md").exists() else ""


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test", "dev", "bench"} <= targets
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_commands_of_the_readme_exist() -> None:
    pf_commands = set(re.findall(r"^(?:\.venv/bin/)?pf ([a-z]+)", README, re.MULTILINE))
    assert {"check", "world"} <= pf_commands
    for command in pf_commands:
        result = subprocess.run(
            [sys.executable, "-m", "pf_assets.cli", command, "--help"], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert result.returncode == 0, result.stderr


def test_files_of_the_readme_exist() -> None:
    files = set(re.findall(r"`((?:pf_core|pf_assets|docs|dagster_home|benchmarks)/[\w./-]+)`", README))
    assert len(files) >= 6
    assert [name for name in files if not (REPOSITORY / name).exists()] == []


def test_ci_runs_the_readmes_test_command() -> None:
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert lines[-1] == "make test"
