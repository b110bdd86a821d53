"""Bits that do not depend on the order in which threads of a GPU finish."""

import os

import torch


def compute_deterministically() -> None:
    """Let this process use deterministic algorithms alone, from now on.

    To be called before the first product on a GPU: cuBLAS reads its workspace setting then (cuBLAS
    documentation, "Results reproducibility"). torch raises RuntimeError, which names the operator,
    where it has no such algorithm (torch.use_deterministic_algorithms).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # a pass over each new buffer, which only shows reads of what nothing was written to
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def allows_tf32() -> bool:
    """Return whether products of float32 may round their factors to TF32; off by default."""
    return torch.get_float32_matmul_precision() != "highest"
