# make demo    install what a user needs into .venv and run the demonstration
# make test    install what a developer needs as well and run the whole suite
# make check   format, lint, types, import contracts, generated files up to date
# make quality judge every pair of an honest and a faulty kernel over 20 fresh seeds and print the counts
# make docs    write the generated files: docs/ from the source, the JSON of the examples from theirs
#
# Nothing needs to be installed first but Python 3.11 or newer; name one with PYTHON=/path/to/python3.
# On Linux, PyPI's torch is the CUDA build. Where pip reaches PyTorch's own index, it has the much smaller CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

VENV := .venv
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
INSTALL := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test check quality docs
.NOTPARALLEL:

demo: $(VENV)/installed
	@$(VENV)/bin/seatrial demo
	@echo "To type a line from the report (seatrial check …), activate the environment first: . $(VENV)/bin/activate"

test: $(VENV)/installed-dev
	@scripts/test

check: $(VENV)/installed-dev
	@scripts/check

quality: $(VENV)/installed-dev
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.quality.pairs --seeds 20 -j 2

docs: $(VENV)/installed-dev
	@scripts/examples
	@$(VENV)/bin/python scripts/docs

$(VENV)/made:
	@test -n "$(PYTHON)" || { echo "seatrial needs Python 3.11 or newer and found none on PATH; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing seatrial and its dependencies into $(VENV)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing seatrial, its dependencies and its tools into $(VENV)"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/installed
