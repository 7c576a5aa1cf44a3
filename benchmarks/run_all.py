"""Runs every benchmark, one after the other, and prints one table of their results and bars.

A benchmark reports, it does not gate: a missed bar is shown, and the exit code stays 0. It is 1 if a benchmark
crashed or reported nothing. `--quick` is a smoke test of the scripts on small sizes, where bars mean nothing.
"""

import argparse
import operator
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RESULT = re.compile(r"RESULT (?P<name>\S+) (?P<value>\S+) (?P<unit>\S+)(?: bar (?P<op>[<>]=?) (?P<limit>\S+))?\s*")
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    figure: str
    bar: str = ""
    verdict: str = ""


def parse_result(line: str, *, is_judged: bool) -> Result:
    match = RESULT.fullmatch(line)
    if match is None:
        raise ValueError(f"not of the form `RESULT <name> <value> <unit> [bar <op> <number>]`: {line!r}")
    figure = f"{match['value']} {match['unit']}"
    if match["op"] is None:
        return Result(name=match["name"], figure=figure)
    is_met = OPERATORS[match["op"]](float(match["value"]), float(match["limit"]))
    verdict = "not judged" if not is_judged else "met" if is_met else "missed"
    return Result(name=match["name"], figure=figure, bar=f"{match['op']} {match['limit']}", verdict=verdict)


def run_benchmark(script: Path, *, quick: bool) -> list[Result] | None:
    """Its results; None if it failed."""
    print(f"== {script.name}", flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(script), *(["--quick"] if quick else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    results = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("RESULT "):
            results.append(parse_result(line, is_judged=not quick))
    exit_code = process.wait()
    print(f"== {script.name}: exit code {exit_code} after {time.perf_counter() - started:.0f} s\n", flush=True)
    return results if exit_code == 0 and results else None


def print_table(results: list[Result]) -> None:
    rows = [("name", "figure", "bar", "")] + [(r.name, r.figure, r.bar, r.verdict) for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test; no bar is judged")
    arguments = parser.parse_args()
    results: list[Result] = []
    failed: list[str] = []
    for script in sorted(Path(__file__).resolve().parent.glob("bench_*.py")):
        found = run_benchmark(script, quick=arguments.quick)
        if found is None:
            failed.append(script.name)
        else:
            results += found
    print_table(results)
    if arguments.quick:
        print("(a smoke test: the sizes were small, whatever the names say)")
    for name in failed:
        print(f"FAILED: {name} crashed, or printed no RESULT line")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
