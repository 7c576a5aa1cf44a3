# Everything runs in .venv, which the first target that needs it makes. Needs Python 3.11 and g++, nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready
JOBS ?= $(shell nproc)
# One thread in each worker: with more, they wait for each other in loops that take the cores from other workers.
CHAOS := tests/chaos tests/logs/test_reader_fuzz.py tests/pins/test_catalogue_fuzz.py tests/config/test_site_fuzz.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# A line for each package as it is fetched; errors as pip prints them, without its remarks on places that do not exist.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
SHOWN := 2> >(grep -v "^WARNING: Location .* is ignored" >&2) | awk '\
	/^Collecting / { sub(/[<>=!~;[].*/, "", $$2); printf "  %3d  %s\n", ++packages, $$2 } \
	/^ *Building wheel for .*: started/ { print "       compiling " $$4 } \
	/^Installing collected packages/ { print "       unpacking " packages " packages, which takes a minute or two" } \
	{ fflush() }'

.PHONY: setup demo ablations report test pytest test-slow test-service test-chaos test-scale coverage docs dev lint format bench bench-scale clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Python packages into .venv"
	@$(PIP) -e '.[pipeline,dev]' $(SHOWN)
	touch $(READY)

demo: setup  ## Make the demo site and run the whole graph on it
	$(BIN)/pf demo

ablations: setup  ## Run every recipe of the paper's tables on a world of its own; goes on where it stopped
	$(BIN)/pf ablations --jobs $(JOBS)

report: setup  ## The page of all tables, figures and verdicts, from the runs that are there
	$(BIN)/pf report

test: setup  ## Lint, types, tests; lint and types take one core for a part of the time
	$(MAKE) --no-print-directory -j 2 lint pytest

pytest: setup
	$(PYTEST)

test-slow: setup  ## Tests that kill processes at many places, train with several ranks, or compile
	$(PYTEST) -m slow

test-service: setup  ## Tests that start a server: Redis, MLflow
	$(PYTEST) -m service

test-chaos: setup  ## Hundreds of killed runs, thousands of mutated files, runs at once for minutes; prints a table
	$(PYTEST) -q -m "" $(CHAOS) --kills 14 --fuzz 600 --minutes 4 --table

coverage: setup  ## Branch coverage of pf_core by `make test` and `make test-service`, file by file
	$(PYTEST) -q -m "not slow and not scale" --cov --cov-report=term:skip-covered

test-scale: setup  ## What is past one machine, against real servers on loopback, which it installs
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || apt-get install -y postgresql
	command -v java >/dev/null || apt-get install -y openjdk-17-jre-headless
	@$(PIP) -e '.[pipeline,dev,production,s3,scale,spark]' $(SHOWN)
	$(BIN)/python -m pytest -m scale tests/scale

docs: setup  ## Rewrite the page that is made from the code
	$(BIN)/python -m pf_core.config.reference > docs/site-file.md

dev: setup  ## Dagster UI on :3000, MLflow UI on :5000; Ctrl-C ends both
	$(BIN)/pf dev

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Every published ratio; about 40 minutes
	$(BIN)/python benchmarks/run_all.py

bench-scale: setup  ## 60M actions of 1M users, end to end; its figures are those of docs/scale.md
	$(BIN)/python benchmarks/bench_scale.py --users 1000000 --actions 60000000 --pins 100000 --divide 10 60 --json docs/scale.json
	$(BIN)/python benchmarks/capacity_plan.py docs/scale.json

clean:  ## Remove what the demo made; keeps .venv
	rm -rf data dagster_home/demo.yaml
	find dagster_home -type f ! -name '*.yaml' -delete
	find dagster_home -type d -empty -delete
