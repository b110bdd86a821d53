# Every target sets up what it needs. The first call installs the pinned packages into .venv.
.PHONY: always run test test-long test-pipeline test-docs test-torch test-cluster test-gpu bench-gpu \
  container lint docs lock rivals clean
.DELETE_ON_ERROR:

# the stages call `python`: the environment comes first on the path
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# `make run PARAMS=params/links.yaml`: in experiments/links, with data and results of its own
ifdef PARAMS
ifeq ($(wildcard $(PARAMS)),)
$(error PARAMS: no such file: $(PARAMS))
endif
FOLDER := experiments/$(basename $(notdir $(PARAMS)))
else
FOLDER := .
endif

run: .venv/.project $(FOLDER)
	@cd $(FOLDER) && python -m shardlab run

experiments/%: always
	@python -m stages.folder $(PARAMS) $@

# a recipe that depends on it always runs
always:

test: .venv/.project
	@pytest -n 2 --dist loadfile -m "not long and not gpu and not cluster"

# all tests that take more than about two seconds, and less than minutes
test-long: .venv/.project
	@pytest -n 2 --dist worksteal -m "long and not minutes"

# of these what CI runs: both tools from nothing, processes that are killed, every command of the
# documents
test-pipeline: .venv/.project
	@pytest -n 2 --dist worksteal -m "long and not minutes" tests/pipeline

# commands of the documents that take over a minute
test-docs: .venv/.project
	@pytest -m minutes tests/pipeline/test_docs.py

# what depends on torch, with another one, in an environment outside of the tree:
# `make test-torch TORCH=2.11.0`
OTHER = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shardlab/torch-$(TORCH)
test-torch:
	@test "$(TORCH)" || { echo "make test-torch: say which, as in TORCH=2.11.0" >&2; exit 2; }
	@python3 -m venv $(OTHER)
	@$(OTHER)/bin/pip install --quiet torch==$(TORCH)
	@grep -v '^torch==' requirements.lock \
	  | $(OTHER)/bin/pip install --quiet --no-deps --requirement /dev/stdin
	@PATH=$(OTHER)/bin:$$PATH $(OTHER)/bin/python -m pytest -n 2 --dist loadfile \
	  -m "not long and not gpu and not cluster" \
	  tests/comm tests/core tests/codecs tests/engines tests/examples

# the quick pipeline through a SLURM of three nodes, which ends with the tests: needs root, for
# namespaces and Debian's packages of SLURM, which it installs
test-cluster: .venv/.project
	@python -m tests.cluster -p no:xdist

# what a GPU computes, and figures of it, five minutes each: parts with time limits, most telling
# first; `DEVICE=cpu make test-gpu` is a dry run
test-gpu: .venv/.project
	@python -m benchmarks.gpu correct

bench-gpu: .venv/.project
	@python -m benchmarks.gpu measure

# the environment as an image, by each builder that is installed
container:
	@containers/build

lint: .venv/.project
	@ruff check
	@ruff format --check
	@snakefmt --check Snakefile workflow
	@mypy
	@codespell
	@lint-imports --no-logo

# the pages as a site: docs/_build/html
docs: .venv/.project
	@sphinx-build -q -W --keep-going -b html docs docs/_build/html

# exact versions of everything in pyproject.toml; torch without the suffix of one build, so that the
# machine's package index decides between CPU and CUDA
lock: .venv/.project
	@pip-compile --quiet --all-extras --no-annotate --no-emit-find-links --no-emit-index-url \
	  --no-emit-options --no-emit-trusted-host --output-file=requirements.lock --strip-extras \
	  pyproject.toml
	@sed -i -E -e 's/^(torch==[0-9.]+)\+.*/\1/' -e '/^shardlab @/d' requirements.lock

# packages that benchmarks compare with: outside of the environment
rivals: .venv/.packages
	@rm -rf .work/rivals
	@pip install --quiet --no-deps --target .work/rivals --requirement benchmarks/requirements.txt

# results of the pipeline outside of git; .venv, DVC's cache and the committed results stay
clean:
	@rm -rf .snakemake .work build data/*.* data/tokens data/inputs/* dvc_plots logs \
	  results/report/plots results/report/report.html results/rounds/*/runs
	@find results -name final_model -prune -exec rm -rf {} + 2>/dev/null || true
	@find results \( -name events.jsonl -o -name trace.json.gz \) -delete 2>/dev/null || true

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "python3 is too old or absent: shardlab needs Python 3.11 or newer"; exit 1; }
	@python3 -m venv .venv

.venv/.packages: requirements.lock | .venv/bin/python
	@echo "Installing the pinned packages into .venv (some minutes the first time) ..."
	@.venv/bin/python -m pip install --quiet --requirement requirements.lock
	@touch $@

# The C++ kernels are built into shardlab/kernels; without a compiler the PyTorch reference is used.
# The path file, unlike an editable installation, comes after the current folder: a copy of this tree
# (`dvc exp run --temp` makes them) runs its own code.
.venv/.project: .venv/.packages .venv/bin/shardlab $(wildcard csrc/*)
	@python -m shardlab.kernels.native
	@echo "$(CURDIR)" > "$$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shardlab.pth"
	@touch $@

# the command that `pip install` would write
.venv/bin/shardlab: Makefile | .venv/bin/python
	@printf '#!%s\nfrom shardlab.cli import main\n\nmain()\n' $(CURDIR)/.venv/bin/python > $@
	@chmod +x $@
