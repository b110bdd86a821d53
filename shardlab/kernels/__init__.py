"""Native code, its threads and their CPUs, Adam, and kernels of torch.compile."""
