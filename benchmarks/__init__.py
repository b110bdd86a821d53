"""Benchmarks: ratios to the limits of the machine. docs/benchmarks.md lists them."""

import os

# as in stages/__init__.py: ranks are forked
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# torch's profiler prints its stages on stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
