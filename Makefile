# The first run of a target installs what it needs into .venv; later runs start at once.
# PYTHON=python3.12 chooses the interpreter, ARGS="..." is passed on to train, test and bench.

SHELL := bash
BIN := .venv/bin
TRAIN_ENV := .venv/.installed
TEST_ENV := .venv/.installed-test
MJLAB_ENV := .venv-mjlab/.installed
# All extras of pyproject.toml; jax contains skrl.
EXTRAS := gpu,onnx,rsl-rl,rl-games,jax,gymnasium,playground,hand,s3,torchrunx,report,viewer,wandb,mlflow,dev
PEERS := bench/peers/requirements-mjlab.lock
# Tests that mount file systems or create networks run as root only.
TESTS := $(if $(filter 0,$(shell id -u)),"not gpu","not gpu and not root")
export PYTHON
# Tests start hundreds of processes: each imports bytecode, not source.
unexport PYTHONDONTWRITEBYTECODE

# The fast part of the tests, for daily work: files that train in few processes.
QUICK := tests/env tests/tensors tests/run tests/learners/ppo tests/tasks/test_cartpole.py tests/tasks/test_registry.py \
	tests/training tests/test_train.py tests/test_validation.py \
	--ignore=tests/env/test_gymnasium_env.py --ignore=tests/env/test_bring_your_env.py

.PHONY: help train test quick check format bench lock clean
.DELETE_ON_ERROR:

help:
	@echo 'make train    train cartpole on this machine     ARGS="--max-iterations 50"'
	@echo 'make test     make check, then the tests          ARGS="-k resume"'
	@echo 'make quick    make check, then the fast tests'
	@echo 'make check    formatting, lint, types and import layers, as the pre-commit hook runs them'
	@echo 'make format   format the code and fix what ruff can fix'
	@echo 'make bench    throughput against peers on this CPU'
	@echo 'make lock     resolve all dependencies again and write requirements.lock'
	@echo 'make clean    remove environments, caches and builds; runs/ stays'

train: $(TRAIN_ENV)
	$(BIN)/paceline train cartpole --gpu-ids none $(ARGS)

test: check
	scripts/system_packages $(BIN)/python
	scripts/node_packages
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m $(TESTS) --durations=10 $(ARGS)

quick: check
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not root" $(QUICK) $(ARGS)

check: $(TEST_ENV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(TEST_ENV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(TEST_ENV) $(MJLAB_ENV)
	$(BIN)/python bench/cpu.py $(ARGS)

lock:
	scripts/lock $(EXTRAS)

clean:
	rm -rf .venv .venv-mjlab .venv-lock bench/build .pytest_cache .ruff_cache .import_linter_cache
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(TRAIN_ENV): pyproject.toml requirements.lock
	scripts/install .venv -c requirements.lock -e .
	@touch $@

$(TEST_ENV): pyproject.toml requirements.lock
	scripts/install .venv -c requirements.lock -e '.[$(EXTRAS)]'
	@touch $(TRAIN_ENV) $@

$(MJLAB_ENV): $(PEERS)
	scripts/install .venv-mjlab -r $(PEERS)
	@touch $@
