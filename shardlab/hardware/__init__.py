"""The machine's CPUs and NUMA nodes, and their assignment to ranks."""
