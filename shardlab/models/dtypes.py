"""Types of computation."""

import torch

from shardlab.config.strategy import CanonicalStrategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the type of that name; of `auto` the narrowest with fast products on the device."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    made_for_it = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if made_for_it else torch.float16


def uses_fp16(strategy: CanonicalStrategy, device: torch.device) -> bool:
    """Return whether some layer computes in fp16."""
    names = [strategy.param_dtype, *(each.param_dtype for each in strategy.overrides)]
    return any(dtype_of(name, device) is torch.float16 for name in names if name is not None)
