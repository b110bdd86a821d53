"""The kernels for CUDA, written in Triton; imported only when a vector lies on a GPU."""
