# Everything runs in .venv, which the first target makes; see scripts/setup.sh.
READY := .venv/.ready
ARGS ?=

.PHONY: help demo serve test test-full lint types redis browser compiler clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## serve the bundled model, show speculation at work, shut down
	@.venv/bin/draftline demo $(ARGS)

serve: $(READY) ## serve the bundled model with the OpenAI API; ARGS="--port 8000 ..."
	@.venv/bin/draftline serve $(ARGS)

test: $(READY) redis compiler ## lint, types and tests
	@scripts/test.sh -m "not full" $(ARGS)

test-full: $(READY) redis compiler ## the same with the whole matrix of the lossless tests
	@scripts/test.sh $(ARGS)

lint: $(READY) ## style, formatting, spelling, layers of imports, sizes
	@scripts/lint.sh

types: $(READY) ## types
	@.venv/bin/basedpyright

redis:
	@command -v redis-server >/dev/null || scripts/setup.sh redis

browser: ## install Chromium, which tests of the page at /ui are skipped without
	@command -v chromium >/dev/null || scripts/setup.sh browser

compiler: $(READY)
	@scripts/setup.sh compiler

clean: ## remove .venv and what was built
	rm -rf .venv build dist draftline.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh venv
