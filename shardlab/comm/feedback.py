"""Error feedback: what was not sent is added to the next vector of the same unit."""

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey


class ErrorFeedback:
    """Residuals of one sender, one float32 vector per unit (Karimireddy et al. 2019, algorithm 2).

    Law: over any number of messages, sum(sent) + residual = sum(given).
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    def encode(
        self,
        codec: Codec,
        vector: Tensor,
        part: str,
        key: MessageKey,
        out: Tensor | None = None,
    ) -> Tensor:
        """The payload of `vector` and what is left over from the message before.

        Args:
            part: names the residual; a message that goes to several ranks has one part for each.
            out: uint8 [codec.payload_bytes(n)] to write to, as for `Codec.encode`.

        Raises:
            ValueError: the part had another length before.
        """
        residual = self._residuals.get(part)
        if residual is None:
            residual = self._residuals[part] = torch.zeros_like(vector)
        if residual.shape != vector.shape:
            raise ValueError(
                f"error feedback: message {part!r} has {vector.numel()} elements, its residual "
                f"{residual.numel()}: the layout of the model changed"
            )
        return codec.encode_residual(vector, residual, residual, key, out)

    def norm(self) -> float:
        """Euclidean norm over all residuals of this rank."""
        return float(sum(r.double().square().sum() for r in self._residuals.values())) ** 0.5

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals by part."""
        return dict(self._residuals)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from saved residuals."""
        self._residuals = {part: residual.clone() for part, residual in state.items()}
