# make demo   train a small model end to end, on this machine, with nothing else installed
# make test   lints, types, import contracts and every test
# make check  lints, types and import contracts only
# make faults every fault of docs/guides/survival.md injected for real, and a table of what each cost
# make storm  a run killed 200 times at random moments, and another 1,000 times (hours)
# make bench  the measurements of docs/benchmarks.md
# Each target makes .venv on its own, and reuses it while pyproject.toml and constraints.txt are unchanged.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# Runs a set-up command quietly: its output goes to the log, whose end is shown if the command fails.
LOG    := $(VENV)/install.log
QUIET   = >$(LOG) 2>&1 || { status=$$?; tail -n 40 $(LOG); echo "Set-up failed; all of its output is in $(LOG)"; exit $$status; }

.PHONY: demo test check lint types faults storm bench docs clean

demo: $(VENV)/.core
	@$(BIN)/argosy demo

# Types are checked beside the tests, which wait for other programs now and then; what mypy says is the end of the output.
test: lint
	@$(MAKE) --no-print-directory types >$(VENV)/types.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; \
	[ $$tests = 0 ] || echo "make test: tests failed (pytest's exit code $$tests); its summary is above" >&2; \
	[ $$types = 0 ] || echo "make test: make types failed" >&2; \
	[ $$tests = 0 ] && [ $$types = 0 ]

check: lint types

# Without ruff's cache: where an import belongs depends on other files, and a cached answer does not notice that they changed.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/lint-imports

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m "" tests/faults -k "not long_storm"

storm: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/faults/test_storm.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.dev
	$(BIN)/python -m argosy.errors > docs/errors.md
	$(BIN)/argosy config reference > docs/run-spec.md
	$(BIN)/python -m argosy.launch.chart charts/argosy

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Argosy needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12"; exit 2; }
	@mkdir -p $(VENV)
	@$(PYTHON) -m venv $(VENV) $(QUIET)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing Argosy into $(VENV) (about a minute the first time)"
	@$(PIP) --editable . $(QUIET)
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) --editable '.[dev]' $(QUIET)
	@touch $@

clean:
	rm -rf $(VENV) argosy-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
