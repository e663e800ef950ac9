# `make check` is what CI runs. Every target works from a clean clone after `make dev`.
PYTHON ?= .venv/bin/python

.PHONY: dev test slow fast lint format types typing-shim check golden bench

dev:
	python3 -m venv .venv
	.venv/bin/pip install -e '.[runtime,hf,test,dev]'
	$(MAKE) typing-shim

test:
	$(PYTHON) -m pytest -q

# Two hundred kills of a saving run, and the like: some minutes.
slow:
	$(PYTHON) -m pytest -q -m slow

# What a change in the planner needs: no ranks, nothing slow.
fast:
	$(PYTHON) -m pytest -q -m 'not gloo and not slow'

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# The checkout's folders carry the import names `zplan.planner` and so on only after installation, and editable installs
# tell type checkers nothing; links in the shape of the installed package do.
typing-shim:
	rm -rf .typing
	mkdir -p .typing/zplan
	cd .typing/zplan && ln -s ../../zplan/*.py . && ln -s ../../planner ../../runtime ../../cuda_ops .

types: typing-shim
	$(PYTHON) -m mypy

check: lint types test

# Rewrites what the documents show of commands' output; look at the diff.
golden:
	ZPLAN_REWRITE=1 $(PYTHON) -m pytest -q tests/test_readme.py tests/test_config_doc.py tests/test_claims.py

bench:
	$(PYTHON) tests/bench/cold_start.py
