# Needs Python 3.11+ and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: bench test test-cuda check lint types benchmarks clean

bench: $(READY)
	$(BIN)/gockpt bench --model gpt-1.3b

# Two at a time: most tests wait for a process, a disk or a modelled device.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-cuda: $(READY)
	$(BIN)/python -m pytest -m cuda tests

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# The installed package is checked, since cli/ and workloads/ only have their real names there.
types: $(READY)
	rm -rf build/types
	$(BIN)/pip install --quiet --no-deps --target build/types .
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --package gockpt

benchmarks: $(READY)
	$(BIN)/python -m pytest benchmarks -o python_files="bench_*.py" --benchmark-columns=min,median,rounds -s

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
