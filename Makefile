# make demo   train a small model end to end, on this machine, with nothing else installed
# make test   lints, types, import contracts and every test
# make test-gpu  the layout matrix, checkpoints and kernels on this machine's GPUs, with NCCL; one GPU is enough
# make check  lints, types and import contracts only
# make faults every fault of docs/guides/survival.md injected for real, and a table of what each cost
# make faults-gpu  faults of ranks on NCCL, on this machine's GPUs; one is enough
# make storm  a run killed 200 times at random moments, and another 1,000 times (hours)
# make bench  the measurements of docs/benchmarks.md
# make docs   the pages that are made from the code
# make site   the documentation as a site in site/, built twice and compared
# make tutorials      the outputs that the tutorials show, from commands run now (5 minutes on two idle cores)
# make release-check  wheel, sdist and SBOM in dist/, and the wheel tried in an empty environment (10 minutes)
# Each target makes .venv on its own, and reuses it while pyproject.toml and constraints.txt are unchanged.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# The sources are compiled once, not by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# Runs a set-up command quietly: its output goes to the log, whose end is shown if the command fails.
LOG    := $(VENV)/install.log
QUIET   = >$(LOG) 2>&1 || { status=$$?; tail -n 40 $(LOG); echo "Set-up failed; all of its output is in $(LOG)"; exit $$status; }

.PHONY: demo test test-gpu check lint types faults faults-gpu storm bench docs site tutorials release-check clean

demo: $(VENV)/.core
	@$(BIN)/argosy demo

# Types are checked beside the tests, which wait for other programs now and then; what mypy says is the end of the output.
test: lint
	@$(MAKE) --no-print-directory types >$(VENV)/types.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; \
	[ $$tests = 0 ] || echo "make test: tests failed (pytest's exit code $$tests); its summary is above" >&2; \
	[ $$types = 0 ] || echo "make test: make types failed" >&2; \
	[ $$tests = 0 ] && [ $$types = 0 ]

test-gpu: $(VENV)/.dev
	ARGOSY_TEST_GPU=1 $(BIN)/python -m pytest tests/dist/test_matrix.py tests/dist/test_checkpoints.py tests/dist/test_gpu_ranks.py tests/dist/test_graph_ranks.py tests/model

check: lint types

# Without ruff's cache: where an import belongs depends on other files, and a cached answer does not notice that they changed.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/lint-imports

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m "" tests/faults -k "not long_storm" --ignore tests/faults/test_gpu_faults.py

faults-gpu: $(VENV)/.dev
	ARGOSY_TEST_GPU=1 $(BIN)/python -m pytest -m "" tests/faults/test_gpu_faults.py

storm: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/faults/test_storm.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.dev
	$(BIN)/python -m argosy.errors > docs/errors.md
	$(BIN)/argosy config reference > docs/run-spec.md
	$(BIN)/python -m argosy.cli.reference_page > docs/cli.md
	$(BIN)/python benchmarks/parallelism_pictures.py
	$(BIN)/python -m argosy.launch.chart charts/argosy

# Dates in the site are those of the last commit, so that the same sources give the same bytes.
site: $(VENV)/.dev
	@export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 0) NO_MKDOCS_2_WARNING=1; \
	$(BIN)/mkdocs build --strict --quiet --site-dir site && \
	$(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site-again && \
	diff -r site $(VENV)/site-again && echo "site/index.html"

tutorials: $(VENV)/.dev
	$(BIN)/python tests/doc_pages.py docs/guides/first-run.md docs/tutorials/second-run.md

release-check: $(VENV)/.python
	$(BIN)/python .ci/release_check.py $(if $(TAG),--tag $(TAG))

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
	rm -rf $(VENV) argosy-demo site dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
