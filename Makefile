# make train   sets up what is missing, then trains configs/tiny.toml with 4 ranks
# make test    sets up what is missing, then runs the whole test suite (STAGES="unit mpi" for a part of it)
# make test-containers   builds the image of containers/cpu.def with each MPI library, as root, and trains in it
#
# HPCTRAIN_NO_APT=1 installs nothing on the system; PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=<url> names
# the package index to take torch from, such as https://download.pytorch.org/whl/rocm6.4

RANKS ?= 4
STAGES ?=

train:
	@.ci/setup
	@.ci/mpirun $(RANKS) python -m hpctrain train configs/tiny.toml

test:
	@.ci/setup test
	@.venv/bin/python .ci/test $(STAGES)

test-containers:
	@.ci/setup containers
	@.venv/bin/python .ci/test containers

clean:
	rm -rf .venv .venv-mpich runs .pytest_cache .ruff_cache .hypothesis

.PHONY: train test test-containers clean
