"""Records of runs, timings and estimates, and how to read them."""
