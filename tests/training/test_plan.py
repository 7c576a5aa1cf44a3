"""A model is named by what decides it: the fingerprint of the code, and which files it covers."""

import ast
from pathlib import Path

import pytest

from pf_core.experiments.plan import JUDGING_CODE
from pf_core.training.plan import MODEL_CODE, code_fingerprint

CORE = Path(__file__).parents[2] / "pf_core"

SOURCE = '''"""Sampling."""

import numpy as np


def sample_below(num: int, size: int) -> np.ndarray:
    """Draw distinct numbers."""
    return np.arange(num)[:size]  # the first ones
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "sampling.py").write_text(SOURCE)
    (tmp_path / "training" / "loss.py").write_text("MARGIN = 1\n")
    return tmp_path


def fingerprint(package: Path) -> str:
    return code_fingerprint(["training"], package=package)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import numpy as np", "import numpy as np\nfrom pathlib import Path"),
        ('"""Draw distinct numbers."""', '"""Return some numbers."""'),
        ("  # the first ones", ""),
        ("[:size]", "[ : size ]"),
    ],
)
def test_imports_docstrings_comments_and_layout_do_not_count(package: Path, before: str, after: str) -> None:
    known = fingerprint(package)
    assert before in SOURCE
    (package / "training" / "sampling.py").write_text(SOURCE.replace(before, after))
    assert fingerprint(package) == known


def test_moving_a_file_or_a_function_does_not_count(package: Path) -> None:
    known = fingerprint(package)
    (package / "training" / "draws").mkdir()
    (package / "training" / "sampling.py").rename(package / "training" / "draws" / "distinct.py")
    assert fingerprint(package) == known
    moved = (package / "training" / "draws" / "distinct.py").read_text()
    (package / "training" / "loss.py").write_text(f"{moved}\n\nMARGIN = 1\n")
    (package / "training" / "draws" / "distinct.py").write_text("")
    assert fingerprint(package) == known


@pytest.mark.parametrize(("before", "after"), [("[:size]", "[-size:]"), ("num: int", "num: float")])
def test_a_changed_statement_counts(package: Path, before: str, after: str) -> None:
    known = fingerprint(package)
    (package / "training" / "sampling.py").write_text(SOURCE.replace(before, after))
    assert fingerprint(package) != known


def test_a_second_statement_that_is_the_same_counts(package: Path) -> None:
    known = fingerprint(package)
    (package / "training" / "again.py").write_text("MARGIN = 1\n")
    assert fingerprint(package) != known


def reached_from(module: str, *, not_through: tuple[str, ...]) -> set[str]:
    """Paths in pf_core of all modules that `module` imports, directly or through others."""
    found: set[str] = set()
    queue = [module]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        if path in not_through:
            continue
        tree = ast.parse((CORE / path).read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        queue += [f"{name.removeprefix('pf_core.').replace('.', '/')}.py" for name in names if "pf_core." in name]
    return found


def covered(path: str, code: tuple[str, ...]) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in code)


DATA = ("training/training_set.py", "training/packing.py", "evaluation/question.py")
"""What reads data, whose own fingerprint counts, is not followed further."""


def test_everything_that_trains_decides_a_model() -> None:
    reached = reached_from("training/trainer.py", not_through=DATA)
    assert len(reached) > 15
    apart = {path for path in reached if not covered(path, MODEL_CODE)}
    assert {path for path in apart if not path.startswith(("storage/", "metrics/"))} <= {
        "errors.py",
        "days.py",
        "layouts.py",  # data of another layout is refused
        "parent_process.py",  # when a process ends
        "printable.py",
        "progress.py",
        "config/base.py",
        "schemas.py",
    }


def test_everything_that_judges_decides_a_judgement() -> None:
    forgetting = "logs/deletion_list.py"  # who is taken out of stored scores
    reached = reached_from("evaluation/protocol.py", not_through=(*DATA, forgetting))
    assert len(reached) > 15
    apart = {path for path in reached if not covered(path, (*JUDGING_CODE, *MODEL_CODE))}
    assert {path for path in apart if not path.startswith("storage/")} <= {
        forgetting,
        "errors.py",
        "days.py",
        "layouts.py",  # data of another layout is refused
        "printable.py",
        "progress.py",
        "config/base.py",
        "config/cron.py",  # whether a schedule can be read
        "config/serving.py",
        "pins/lookup.py",  # finds an id or not: there is nothing to decide
        "schemas.py",
    }
