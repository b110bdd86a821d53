"""The machine: CPUs, NUMA nodes, and which of them each rank gets."""
