"""Settings of all tests."""

import gc
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

# one thread everywhere: sums depend on the number of threads, and forked ranks must not
# inherit a pool that was already started
os.environ["OMP_NUM_THREADS"] = "1"

# ranks are forked from a process that has not asked the CUDA driver (stages/__init__.py)
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# how long an example takes says more of the machine's other work than of the code
settings.register_profile("shardlab", deadline=None, max_examples=50)
settings.register_profile("exhaustive", deadline=None, max_examples=100_000)
settings.load_profile("shardlab")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give laws the time that an exhaustive search for counterexamples takes."""
    if config.getoption("hypothesis_profile", None) == "exhaustive":
        config.option.timeout = 0


def pytest_collection():
    """Keep what the tests import: no process searches it for garbage again and again."""
    gc.disable()


def pytest_collection_finish():
    """Nor do the ranks that are forked from here, which would copy it to do so."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    """Skips without enough GPUs; says whether the test needs ranks of its own, before any start."""
    if mark := item.get_closest_marker("gpu"):
        import torch  # not above: it reads the variables that are set there

        if torch.cuda.device_count() < (count := mark.kwargs.get("count", 1)):
            pytest.skip(f"needs {count} NVIDIA GPUs")
    if ranks := sys.modules.get("tests.ranks"):
        ranks.fresh = ranks.needs_fresh_ranks(item)


@pytest.fixture(autouse=True)
def variables():
    """Restore the environment: libraries set variables, and processes of later tests differ."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def permitted():
    """Skips where this process may not make links in network namespaces."""
    # not above: what is imported there comes before the variables that it reads
    from shardlab.comm.emulated_link import Links
    from shardlab.core.errors import UserError
    from shardlab.core.link import Link

    try:
        with Links(1, Link(rate="1gbit")):
            pass
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token shards to train on."""
    # not above: what is imported there comes before the variables that it reads
    from tests.token_data import make_token_data

    return make_token_data(tmp_path_factory.mktemp("data"))
