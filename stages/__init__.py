"""Stages of the pipeline, and the other commands: one thin command each."""

import os

# Stages fork their ranks, and a process that has asked the CUDA driver cannot fork one that uses
# CUDA. With this torch.cuda.is_available, which libraries call freely, asks NVML instead.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
