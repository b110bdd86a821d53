"""Payloads on the wire: the version of the format, descriptions of codecs, buffers of messages.

A message is a payload and nothing else: it does not say which codec wrote it. Ranks therefore
compare codec and size before the first message of each unit
(`shardlab.comm.collective.Collective`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import Method

VERSION = 4
"""Version of the wire format; payloads of versions up to 3 had an envelope."""
_LINE = 64
"""Bytes of a cache line."""


class PayloadError(ValueError):
    """Error of ranks that disagree on the payloads that they are about to send."""


def describe(method: Method) -> str:
    """Return the codec's name and options, as in `"int8:format=int8,group=128"`.

    Options are the public attributes whose values are numbers, strings or codecs, sorted by name;
    attributes that every codec has are left out.
    """
    values = {
        key: describe(value) if isinstance(value, Codec) else value
        for key, value in sorted(vars(method).items())
        if not key.startswith("_")
        and key not in Codec.__annotations__
        and isinstance(value, (bool, int, float, str, Codec))
    }
    options = ",".join(f"{key}={value}" for key, value in values.items())
    return f"{method.name}:{options}" if options else method.name


class Buffers:
    """One growing buffer per purpose, reused from message to message.

    To allocate memory costs more than to encode into it. A buffer keeps its bytes until its purpose
    is requested again. On a GPU every buffer is new, since several streams may encode at a time,
    and PyTorch's allocator returns freed memory to the stream that used it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def bytes(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """Return an uninitialized buffer, uint8 [size], that starts at a cache line."""
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[purpose] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size]

    def floats(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """Return an uninitialized buffer, float32 [size]."""
        return self.bytes(purpose, 4 * size, device).view(torch.float32)

    def messages(self, purpose: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return buffers of `sizes` bytes, each of which starts at a cache line.

        Kernels write full lines faster than parts of two lines.
        """
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _LINE) * _LINE
        buffer = self.bytes(purpose, end, device)
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
