# `make demo` shows the main job on a fresh machine, `make demo-vlm` with pictures; `make test` sets up and passes the tests.
# TORCH pins the build that is installed first: a bare `torch` would bring gigabytes of CUDA packages to a CPU machine.
# On a CUDA machine: make demo TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo demo-vlm test lint slow setup clean

demo: $(READY)
	@$(BIN)/paceline demo $(ARGS)

demo-vlm: $(READY)
	@$(BIN)/python -m examples.tiny_vlm demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

slow: $(READY)
	@$(BIN)/python -m pytest -m "slow or net" $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check paceline tests bench examples
	@$(BIN)/ruff format --check paceline tests bench examples
	@$(BIN)/pyright --pythonpath $(BIN)/python

setup: $(READY)

$(READY): pyproject.toml models/pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and f'Python 3.11 or newer is needed, this is {v.major}.{v.minor}; try make PYTHON=python3.11')"
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(TORCH) and paceline with its models (a minute or two, once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	@for name in $$CXX c++ g++ clang++; do command -v $$name && break; done >/dev/null && extras=dev || extras=dev,compiler; \
	test $$extras = dev || echo "There is no C++ compiler: installing ziglang, which is one, for the kernels ..."; \
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[$$extras]" -e models
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
