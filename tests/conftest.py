"""Settings of all tests."""

import os
from pathlib import Path

from hypothesis import settings

# one thread everywhere: sums depend on the number of threads, and forked ranks must not
# inherit a pool that was already started
os.environ["OMP_NUM_THREADS"] = "1"

# before anything imports Triton: without a GPU its kernels run in its interpreter
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# how long an example takes says more of the machine's other work than of the code
settings.register_profile("shardlab", deadline=None)
settings.load_profile("shardlab")
