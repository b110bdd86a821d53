"""What a model computes per token, and how fast the device multiplies matrices."""

from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

_SIZES = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.2


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Of forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B).

    N are the parameters without embeddings, which look up and multiply nothing; a weight that the
    head shares with one counts once. L layers have H heads of Q elements, T is the sequence length.
    Causal attention counts in full, and what is computed again does not count.

    Args:
        model: not wrapped yet, on whatever device.
    """
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    looked_up = embedded - {head.weight} if head is not None else embedded
    multiplied = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in looked_up)
    config = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 12 * config.num_hidden_layers * heads * size * sequence_length
    return float(6 * multiplied + attention)


def product_flops_per_s(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> float:
    """Of this rank's best square matrix product, while the other ranks multiply, too."""
    n = _SIZES[device.type]
    factor = torch.full((n, n), 0.5, dtype=dtype, device=device)
    product = factor @ factor
    dist.barrier(group)
    begin, best = perf_counter(), float("inf")
    while perf_counter() - begin < _SECONDS or best == float("inf"):
        start = perf_counter()
        torch.mm(factor, factor, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    dist.barrier(group)  # nobody goes on while others are timed
    return 2 * n**3 / best
