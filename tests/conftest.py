"""Settings of all tests."""

import os

# one thread everywhere: sums depend on the number of threads, and forked ranks must not
# inherit a pool that was already started
os.environ["OMP_NUM_THREADS"] = "1"
