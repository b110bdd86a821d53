"""Wire formats in C++ (csrc/), each with the PyTorch reference that defines its bits."""
