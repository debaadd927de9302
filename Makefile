# `make demo` shows the main job on a fresh machine, `make demo-vlm` with pictures; `make test` sets up and passes the tests;
# `make docs` builds the website of docs/ into site/, `make wheels` what a release uploads into dist/.
# TORCH pins the build that is installed first: a bare `torch` would bring gigabytes of CUDA packages to a CPU machine.
# On a CUDA machine: make demo TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
DOCS ?= .venv-docs
RELEASE ?= .venv-release
READY := $(VENV)/.ready

.PHONY: demo demo-vlm bench test lint slow docs pictures wheels setup clean

demo: $(READY)
	@$(BIN)/paceline demo $(ARGS)

demo-vlm: $(READY)
	@$(BIN)/python -m examples.tiny_vlm demo $(ARGS)

# The first table of docs/results.md on this machine; `make bench ARGS=--help` lists the options.
bench: $(READY)
	@$(BIN)/python -m bench.speeds $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

slow: $(READY)
	@$(BIN)/python -m pytest -m "more or slow or net" $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check paceline tests bench examples hatch_build.py .ci
	@$(BIN)/ruff format --check paceline tests bench examples hatch_build.py .ci
	@$(BIN)/pyright --pythonpath $(BIN)/python

# The site needs neither torch nor paceline installed: the API pages are read from the sources.
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict $(ARGS)
	@echo "The documentation is in site/index.html"

# Neither do wheels: zig compiles the kernels for every platform.
wheels: $(RELEASE)/.ready
	@$(RELEASE)/bin/python .ci/release.py $(ARGS)

$(DOCS)/.ready: EXTRA = docs
$(RELEASE)/.ready: EXTRA = release
$(DOCS)/.ready $(RELEASE)/.ready: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(EXTRA)'], sep='\n')" > $(@D)/requirements.txt
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check -r $(@D)/requirements.txt
	@touch $@

# The moving pictures of docs/index.md, on a quiet machine; `make pictures ARGS=--help` lists them.
pictures: $(VENV)/.pictures
	@$(BIN)/python -m bench.pictures $(ARGS)

$(VENV)/.pictures: $(READY)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[pictures]"
	@touch $@

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
	rm -rf $(VENV) $(DOCS) $(RELEASE) site .pytest_cache .ruff_cache
