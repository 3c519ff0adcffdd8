# Each target is one line that a person could type; `make demo` and `make test` install what they need.
PYTHON ?= python3
BIN := .venv/bin
export DAGSTER_HOME := $(CURDIR)/.dagster

MINUTES ?= 10
SEED ?= 0

.PHONY: demo ui test test-full soak fuzz check clean

demo: .venv/installed .dagster/dagster.yaml
	$(BIN)/python -m inference_dags.demo

ui: .venv/installed .dagster/dagster.yaml
	$(BIN)/dagster dev --workspace workspace.yaml

test: .venv/installed
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-full: .venv/installed
	$(BIN)/python -m pytest -m "not gpu"

soak: .venv/installed
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --seed $(SEED)

fuzz: .venv/installed
	$(BIN)/python tests/fuzz/fuzz.py --seed $(SEED)

check: .venv/installed .dagster/dagster.yaml
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/dg check yaml && $(BIN)/dg check defs

clean:
	rm -rf .venv .dagster storage

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cpu,rtx,flight-delay,photo-tags,dev]'
	touch $@

.dagster/dagster.yaml: dagster.yaml
	mkdir -p .dagster && cp dagster.yaml $@
