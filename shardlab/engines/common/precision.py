"""The types that a model computes in, and the scale that keeps fp16 gradients from vanishing."""

import torch
from torch import Tensor

from shardlab.strategy.strategy import CanonicalStrategy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type of that name; of `auto` the narrowest whose products the device is made for."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    made_for_it = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if made_for_it else torch.float16


def uses_fp16(strategy: CanonicalStrategy, device: torch.device) -> bool:
    """Whether some layer computes in fp16."""
    names = [strategy.param_dtype, *(each.param_dtype for each in strategy.overrides)]
    return any(dtype_of(name, device) is torch.float16 for name in names if name is not None)


class LossScale:
    """A factor of the loss: halved when a gradient is not finite, doubled after a long calm.

    The rule and constants of Micikevicius et al. 2018 (section 3.2) as in `torch.amp.GradScaler`.
    The ranks stay alike because they hear of the same global norm.

    Args:
        active: without, the factor is 1 for ever.
    """

    _CALM = 2000
    """steps in a row"""

    def __init__(self, active: bool) -> None:
        self._active = active
        self.value = 2.0**16 if active else 1.0
        self._calm = 0

    def update(self, finite: bool) -> None:
        """After a step whose gradients were finite or not."""
        if not self._active:
            return
        self._calm = self._calm + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._calm == self._CALM:
            self.value, self._calm = self.value * 2, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Scale and calm steps; empty when not active."""
        if not self._active:
            return {}
        return {"loss_scale": torch.tensor([self.value, self._calm], dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from `state_dict()`."""
        if self._active:
            value, calm = state["loss_scale"].tolist()
            self.value, self._calm = value, int(calm)
