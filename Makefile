# One virtual environment in .venv, built once from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= true

.PHONY: demo test lint format install clean

install: $(READY)

# torch first and pinned, so that the CPU build is taken where it is at hand instead of gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "unmask needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
		pytest hypothesis ruff mypy types-PyYAML types-tqdm 'triton; sys_platform == "linux"' -e '.[evaluate,molecules]'
	touch $(READY)

# The four objectives on the same English, the same steps, side by side. Needs no network.
demo: $(READY)
	$(BIN)/unmask compare mlm mae-lm exlm mae-exlm --output_dir runs/demo --overwrite --num_hidden_layers 2 --max_length 64 \
		--vocab_size 4096 --eval_fraction 0.03 --eval_steps 0.25 --save_steps 0.5 --max_steps 600

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
