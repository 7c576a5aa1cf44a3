"""The capacity plan shows what the benchmark measured: its tables are not typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "benchmarks" / "capacity_plan.py"


def tables_of(figures: Path) -> list[str]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(figures)], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    return [line for line in result.stdout.splitlines() if line]


def test_the_document_has_the_tables_of_its_figures() -> None:
    document = (REPOSITORY / "docs" / "scale.md").read_text().splitlines()
    missing = [line for line in tables_of(REPOSITORY / "docs" / "scale.json") if line not in document]
    assert missing == [], "run: python benchmarks/capacity_plan.py docs/scale.json"


def test_a_line_is_found_again(tmp_path: Path) -> None:
    """Figures that lie on a line, fixed seconds and seconds a unit, are fitted by it."""
    content = json.loads((REPOSITORY / "docs" / "scale.json").read_text())
    for size in content["sizes"]:
        for stage in size["stages"]:
            stage["seconds"] = 3.0 + 2e-6 * stage["num_units"]
    (tmp_path / "figures.json").write_text(json.dumps(content))
    fitted = [line.split(" | ") for line in tables_of(tmp_path / "figures.json") if "1.00 to 1.00" in line]
    if not fitted:
        pytest.fail("no stage is fitted exactly")
    for line in fitted:
        assert line[3:5] == ["3", "2"], line
