# Everything runs in .venv, which the first target makes; see scripts/setup.sh.
READY := .venv/.ready
ARGS ?=

.PHONY: help demo chat serve test test-full soak lint types docs audit sbom redis browser prometheus browser-if-possible prometheus-if-possible compiler tools clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## serve the bundled model, show speculation at work, shut down
	@.venv/bin/draftline demo $(ARGS)

chat: $(READY) ## fetch SmolLM2 once, and ask it questions with drafts off and on
	@.venv/bin/draftline fetch smollm2
	@.venv/bin/draftline demo --model smollm2 --prompts 2 --temperature 0.5 $(ARGS)

serve: $(READY) ## serve the bundled model with the OpenAI API; ARGS="--port 8000 ..."
	@.venv/bin/draftline serve $(ARGS)

test: $(READY) redis compiler browser-if-possible prometheus-if-possible ## lint, types and tests
	@scripts/test.sh -m "not full" $(ARGS)

test-full: $(READY) redis compiler browser-if-possible prometheus-if-possible ## the same with every case, and more examples of each property
	@scripts/test.sh $(ARGS)

soak: $(READY) redis ## mixed requests on Ray for half an hour while its processes die; ARGS="--minutes 5"
	@.venv/bin/python -m draftline.benchmarks.serving.soak $(ARGS)

lint: $(READY) ## style, formatting, spelling, layers of imports
	@scripts/lint.sh

types: $(READY) ## types
	@.venv/bin/basedpyright

docs: tools ## the pages as a site in build/site, links checked; ARGS=serve to read it
	@.venv-tools/bin/python scripts/stage_pages.py
	@.venv-tools/bin/mkdocs $(or $(ARGS),build --strict)

audit: $(READY) tools ## known vulnerabilities of all packages of .venv; needs a network
	@.venv-tools/bin/pip-audit --progress-spinner off --path .venv/lib/python*/site-packages $(ARGS)

sbom: $(READY) tools ## build/sbom.json: all packages of .venv, as CycloneDX
	@mkdir -p build
	@.venv-tools/bin/cyclonedx-py environment .venv/bin/python --pyproject pyproject.toml \
		--output-reproducible --output-file build/sbom.json $(ARGS)

tools:
	@scripts/setup.sh tools

redis:
	@command -v redis-server >/dev/null || scripts/setup.sh redis

browser: ## install Chromium, which tests of the page at /ui are skipped without
	@command -v chromium >/dev/null || scripts/setup.sh browser

browser-if-possible:
	@command -v chromium >/dev/null || scripts/setup.sh browser || \
		echo 'draftline: without Chromium, tests of the page at /ui are skipped'

prometheus: ## install Prometheus, which tests of what it scrapes are skipped without
	@command -v prometheus >/dev/null || scripts/setup.sh prometheus

prometheus-if-possible:
	@command -v prometheus >/dev/null || scripts/setup.sh prometheus || \
		echo 'draftline: without Prometheus, tests of what it scrapes are skipped'

compiler:
	@command -v g++ >/dev/null || scripts/setup.sh compiler

clean: ## remove .venv and what was built
	rm -rf .venv .venv-tools build dist draftline.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh venv
