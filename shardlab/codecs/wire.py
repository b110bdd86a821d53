"""The envelope of a payload: 8 bytes that tell damage and payloads of somebody else.

bytes          content
4              fingerprint of what the payload is: codec, options, elements, unit, step
4              checksum of the payload and its padding (`shardlab.kernels.checksum`)
payload
0 to 7         zeros, so that the payload of the next message starts at a multiple of 8 bytes
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.base import Codec
from shardlab.kernels.checksum import checksum

HEADER = 8


class PayloadError(ValueError):
    """A payload that is damaged, or that was made by other means than this rank's."""


class Contents(NamedTuple):
    """What a payload is; the ranks that exchange it agree on all of it."""

    codec: str
    """as `describe` puts it"""
    elements: int
    unit: str
    step: int
    """messages of this unit that went before"""

    def fingerprint(self) -> int:
        """The first 4 bytes of the BLAKE2b digest (of 4 bytes) of the parts, NUL between them."""
        text = "\0".join(map(str, self))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def __str__(self) -> str:
        return f"codec {self.codec}, {self.elements} elements, unit {self.unit!r}, step {self.step}"


def describe(codec: Codec) -> str:
    """`"int8:format=int8,group=128"`: the name and the public attributes that are plain values.

    In the order of their names, without those that every codec has.
    """
    values = {
        key: value
        for key, value in sorted(vars(codec).items())
        if not key.startswith("_")
        and key not in Codec.__annotations__
        and isinstance(value, (bool, int, float, str))
    }
    options = ",".join(f"{key}={value}" for key, value in values.items())
    return f"{codec.name}:{options}" if options else codec.name


def message_bytes(payload_bytes: int) -> int:
    """Size of a payload in its envelope."""
    return HEADER + -(-payload_bytes // 8) * 8


def seal(message: Tensor, payload_bytes: int, contents: Contents) -> Tensor:
    """Puts the payload that begins at byte 8 of `message` into its envelope.

    Args:
        message: uint8, at least `message_bytes(payload_bytes)`, starting at a multiple of 8 bytes.

    Returns:
        the part of `message` that is to be sent.
    """
    sealed = message[: message_bytes(payload_bytes)]
    end = HEADER + payload_bytes
    if end < sealed.numel():
        sealed[end:].zero_()
    header = contents.fingerprint() | checksum(sealed[HEADER:]) << 32
    sealed[:HEADER].view(torch.int64).fill_(_signed(header))
    return sealed


def unseal(sealed: Tensor, payload_bytes: int, contents: Contents, sender: int) -> Tensor:
    """The payload in an envelope.

    Raises:
        PayloadError: it is damaged or not what `contents` says; names codec, unit and rank.
    """
    header = int(sealed[:HEADER].view(torch.int64)) % (1 << 64)
    if header >> 32 != checksum(sealed[HEADER:]):
        raise PayloadError(f"payload of rank {sender} ({contents}) arrived damaged")
    if header % (1 << 32) != contents.fingerprint():
        raise PayloadError(
            f"payload of rank {sender} is not what this rank awaits ({contents}): the ranks differ "
            "in codec, options, model or step"
        )
    return sealed[HEADER : HEADER + payload_bytes]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_LINE = 64
"""bytes of a cache line"""


class Buffers:
    """One growing buffer per purpose; it holds what it holds until it is asked for again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    def bytes(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """uint8 [size], with anything in it, starting at a cache line."""
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < size:
            kept = self._kept[purpose, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size]

    def floats(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """float32 [size], with anything in it."""
        return self.bytes(purpose, 4 * size, device).view(torch.float32)

    def messages(self, purpose: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Room for messages of these sizes, whose payloads (behind a header) start at a cache line.

        Kernels write whole lines faster than parts of two.
        """
        starts, end = [], _LINE - HEADER
        for size in sizes:
            starts.append(end)
            end += -(-size // _LINE) * _LINE
        room = self.bytes(purpose, end, device)
        return [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
