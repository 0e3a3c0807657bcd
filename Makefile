# The one front door: people and continuous integration type the same words.
# Every target sets up what it needs first; that takes some milliseconds when there is nothing to do.

PY := .venv/bin/python
PYTEST := $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo check checks test coverage security conformance conformance-mcp conformance-http frameworks bench torture docs reference recording clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## *\(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup:  ## everything the project needs: .venv, and as root the system packages of the tests
	@scripts/setup.sh

demo:  ## an agent's command on a clone of this machine, what it changed, what it was refused, and the real disk untouched
	@scripts/setup.sh --core
	@scripts/demo.sh

check: setup  ## formatting, lint, types, layers, names (seconds)
	@$(MAKE) --no-print-directory checks

checks:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy src tests scripts bench hatch_build.py
	.venv/bin/lint-imports
	$(PY) -m scripts.check_names

test:  ## check and the whole suite, its parts side by side; as root, also as an unprivileged user; PART="e2e-1 sdk" for some
	@scripts/setup.sh --without-wasm
	@$(PY) -m scripts.suite $(PART)

coverage: setup  ## every branch of policy/ and of the gate is taken by their own tests, or it fails
	$(PY) -m coverage run -m pytest -q --hypothesis-seed=0 tests/policy tests/engine/test_gate.py
	$(PY) -m coverage report

security: setup  ## the attack suite on every runtime, as root also as an unprivileged user, with a table of what ran and what did not
	@$(PY) -m scripts.security_table

conformance: setup  ## CPython's own tests inside WebAssembly and natively, side by side; writes docs/conformance.md
	@$(PY) -m scripts.conformance

conformance-mcp: setup  ## the suite of the Model Context Protocol and its inspector against our server; writes docs/mcp-conformance.md
	@$(PY) -m scripts.mcp_conformance

conformance-http: setup  ## Schemathesis against the HTTP interface of a real daemon; writes docs/http-conformance.md
	@$(PY) -m scripts.http_conformance

frameworks: setup  ## the suites of the frameworks that there are adapters for, in environments of their own; writes docs/framework-conformance.md
	@$(PY) -m scripts.frameworks

bench: setup  ## side by side with peers and the last release, in one run: tables, and .bench/report.json; QUICK=1 for a first look, BEFORE=COMMIT, BEFORE=none
	@bench/run.sh '$(BEFORE)' $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

torture: setup  ## the full counts of what make test only samples; long
	AGENT_SANDBOX_TEST_PATIENCE=20 $(PYTEST) -m 'torture and not heavier'
	@AGENT_SANDBOX_TEST_PATIENCE=20 MARKS='(torture or once or slow) and not heavier' scripts/unprivileged.sh

docs:  ## the documentation as a site, in build/site; a warning is an error
	@scripts/setup.sh --without-wasm
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

reference: setup  ## write the pages of docs/ that are made from the code
	$(PY) -m scripts.write_reference

recording: setup  ## run the demonstrations of the README and a guide on a terminal, and draw them: docs/*.svg
	$(PY) -m scripts.record_demo

clean:  ## forget .venv and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .bench build dist
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
