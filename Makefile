# Two commands for newcomers: `make demo` and `make test`. Both install into .venv first;
# run again they install nothing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where the CPU build of torch comes from when the configured index does not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed

.PHONY: demo test check unit lock install clean diagram

install: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@# --no-deps: the list is complete, and resolving would add CUDA builds that break the CPU torch.
	$(BIN)/pip install -q --no-deps $$(grep '^torch==' requirements/cpu.txt) \
	  || $(BIN)/pip install -q --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements/cpu.txt)
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: install
	$(BIN)/python -m orchestrator --steps 5

test: install check
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -m "not real and not gpu"

lock: install
	$(BIN)/pip install -q uv
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/overrides.txt \
	  $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --no-header --no-annotate -q -o requirements/cpu.lock
	@{ echo '# Made by `make lock` from cpu.in; install with: pip install --no-deps -r requirements/cpu.txt'; \
	  cat requirements/cpu.lock; } > requirements/cpu.txt && rm requirements/cpu.lock

diagram: install
	$(BIN)/python -m orchestrator --show-machine

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
