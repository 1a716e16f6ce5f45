# The index of what can be done here; the work is in CMakePresets.json, tests/CMakeLists.txt and tools/.
.NOTPARALLEL:
.PHONY: help run test check check-real check-gpu bench bench-peers lint format install asan tsan aarch64 fuzz python wheel
.PHONY: clean setup ci
.PHONY: build dev test-setup test-gcc test-clang

PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
export CTEST_PARALLEL_LEVEL ?= $(shell nproc)

help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: build ## A language model learns the project's own sources; then fused beside unfused attention, as a table
	build/release/flashback-train --overwrite
	build/release/flashback-train --compare

test: test-setup lint test-clang asan tsan test-gcc aarch64 python ## Everything: lint, gcc, clang, sanitizers, valgrind, qemu, Python

check: test-setup ## Under a minute, before a commit: unit tests and `flashback check`
	cmake --preset dev && cmake --build --preset dev
	ctest --preset dev -L 'unit|check|cuda|metal'

check-real: build ## Both passes over real attention tensors, verified, on every route that takes any length
	build/release/flashback run --table --verify tests/data/*.safetensors
	for r in fused unfused reference; do \
	    build/release/flashback run --route $$r --verify tests/data/*.safetensors || exit 1; done

check-gpu: test-setup ## On a machine with an NVIDIA GPU: all cases, graphs, streams, NVIDIA's sanitizers
	cmake --preset ci && cmake --build --preset ci
	tools/check_gpu.sh build/ci

bench: build ## Speed and memory of all routes on this machine
	build/release/flashback bench

bench-peers: build ## Speed and accuracy beside PyTorch; fetches it where missing. PEERS="--filter causal"
	bench/peers/run.sh --lib build/release/libflashback.so $(PEERS)

lint: test-setup ## Format, clang-tidy and cppcheck
	tools/lint.sh

format: ## Formats all C files
	tools/lint.sh --fix

install: build ## Libraries, header, CLI, manual, pkg-config and CMake files; PREFIX=/usr/local
	cmake --install build/release --prefix $(PREFIX)

asan: test-setup ## Tests under the address and undefined behaviour sanitizers
	cmake --preset asan && cmake --build --preset asan
	ctest --preset asan

tsan: test-setup ## Tests under the thread sanitizer
	cmake --preset tsan && cmake --build --preset tsan
	ctest --preset tsan

aarch64: ## Tests of the NEON kernels: a cross build, run by qemu
	@tools/setup.sh run aarch64
	cmake --preset aarch64 && cmake --build --preset aarch64
	ctest --preset aarch64

python: build ## Tests of the Python package; makes a Python with PyTorch where there is none. PYTEST="-k sinks"
	FLASHBACK_LIB=$(CURDIR)/build/release/libflashback.so bindings/python/test.sh $(PYTEST)

wheel: setup ## The Python package as build/wheel/*.whl
	@tools/setup.sh python
	python3 -m pip wheel --no-deps --wheel-dir build/wheel .

fuzz: test-setup ## Runs each fuzz target for FUZZ_SECONDS=60
	cmake --preset fuzz && cmake --build --preset fuzz
	for f in build/fuzz/tests/fuzz_*; do $$f -artifact_prefix=build/fuzz/ -max_total_time=$(FUZZ_SECONDS) || exit 1; done

clean: ## Removes all builds
	rm -rf build

setup: ## Installs what `make run` needs; nothing to do is fast
	@tools/setup.sh run

ci: test ## What .ci/run runs

build: setup
	cmake --preset release && cmake --build --preset release

test-setup:
	@tools/setup.sh run test nvrtc

test-gcc:
	cmake --preset ci && cmake --build --preset ci
	ctest --preset ci

test-clang:
	cmake --preset ci-clang && cmake --build --preset ci-clang
	ctest --preset ci-clang
