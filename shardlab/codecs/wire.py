"""Wire format of payloads: the envelope, and the buffers that hold messages.

bytes          content of a message
1              version of this format
3              fingerprint of the contents: codec, options, elements, unit, step
4              checksum of the payload and its padding
payload
0 to 7         zeros, so that the payload of the next message starts at a multiple of 8 bytes
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from shardlab.codecs.base import Codec
from shardlab.codecs.kernels.checksum import write_header
from shardlab.core.device import accelerator_of

HEADER = 8
VERSION = 3
"""of the envelope; 2 had another checksum on devices, 1 another one everywhere and no version"""
_LINE = 64
"""bytes of a cache line"""


class PayloadError(ValueError):
    """Damaged payload, or one with other contents than this rank expects."""


class Contents(NamedTuple):
    """Description of a payload, on which the ranks that exchange it agree."""

    codec: str
    """as returned by `describe`"""
    elements: int
    unit: str
    step: int
    """earlier messages of this unit"""

    def identity(self) -> int:
        """Return the first 4 bytes of the header, little endian: version and fingerprint.

        The fingerprint is the BLAKE2b digest (of 3 bytes) of the fields, NUL between them.
        """
        text = "\0".join(map(str, self))
        fingerprint = hashlib.blake2b(text.encode(), digest_size=3).digest()
        return VERSION | int.from_bytes(fingerprint, "little") << 8

    def check(self, identity: int, sender: int) -> None:
        """Compare with the identity that another rank sent.

        Raises:
            PayloadError: they differ in version or contents.
        """
        if identity % (1 << 8) != VERSION:
            raise PayloadError(
                f"payload of rank {sender} ({self}) has envelope version {identity % (1 << 8)}, "
                f"this rank reads version {VERSION}: install the same shardlab on all ranks"
            )
        if identity != self.identity():
            raise PayloadError(
                f"payload of rank {sender} is not the one that this rank expects ({self}): the "
                "ranks differ in codec, options, model or step: make them equal"
            )

    def __str__(self) -> str:
        return f"codec {self.codec}, {self.elements} elements, unit {self.unit!r}, step {self.step}"


def describe(codec: Codec) -> str:
    """Return the codec's name and options, as in `"int8:format=int8,group=128"`.

    Options are the public attributes that are plain values, in the order of their names, without
    those that every codec has.
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
    """Return the size of a payload in its envelope."""
    return HEADER + -(-payload_bytes // 8) * 8


def seal(message: Tensor, payload_bytes: int, contents: Contents) -> Tensor:
    """Write the header and padding of the payload that begins at byte 8 of `message`.

    Args:
        message: uint8, at least `message_bytes(payload_bytes)`, starting at a multiple of 8 bytes.

    Returns:
        The part of `message` that is to be sent.
    """
    sealed = message[: message_bytes(payload_bytes)]
    end = HEADER + payload_bytes
    if end < sealed.numel():
        sealed[end:].zero_()
    header = sealed[:HEADER].view(torch.int64)
    if accelerator_of(message.device) is None:
        header.fill_(_signed(contents.identity() | checksum(sealed[HEADER:]) << 32))
    else:
        write_header(sealed[HEADER:].view(torch.int64), contents.identity(), header)
    return sealed


def unseal(
    sealed: Tensor,
    payload_bytes: int,
    contents: Contents,
    sender: int,
    report: Callable[[Tensor, Callable[[int], None]], None] = lambda value, read: read(int(value)),
) -> Tensor:
    """Return the payload in an envelope.

    Args:
        report: called on a device with an int64 [] and its reader, which raises `PayloadError`: so
            that the host need not wait for the message.

    Raises:
        PayloadError: it is damaged or has other contents; names codec, unit and rank.
    """
    header = sealed[:HEADER].view(torch.int64)

    def check(difference: int) -> None:
        """Raise an error unless the header is the expected one, but for no bit."""
        identity = contents.identity() ^ difference & 0xFFFFFFFF
        # the version first: the checksum of another version says nothing
        if identity % (1 << 8) == VERSION and difference >> 32:
            raise PayloadError(f"payload of rank {sender} ({contents}) arrived damaged")
        contents.check(identity, sender)

    if accelerator_of(sealed.device) is None:
        expected = contents.identity() | checksum(sealed[HEADER:]) << 32
        check((int(header) ^ expected) % (1 << 64))
    else:
        expected_header = torch.empty_like(header)
        write_header(sealed[HEADER:].view(torch.int64), contents.identity(), expected_header)
        report((header ^ expected_header).view(()), check)
    return sealed[HEADER : HEADER + payload_bytes]


def checksum(data: Tensor) -> int:
    """Return the lower 32 bits of XXH3 (64 bits) of contiguous bytes, a multiple of 8, on a CPU."""
    return int(xxhash.xxh3_64_intdigest(data.numpy().data)) & 0xFFFFFFFF


def _signed(word: int) -> int:
    """Return 64 bits as the signed number that torch takes."""
    return word - (1 << 64) if word >> 63 else word


class Buffers:
    """One growing buffer per purpose, reused from message to message.

    Fresh memory costs more than encoding into it. A buffer keeps its bytes until its purpose is
    requested again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    def bytes(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """Return uninitialized uint8 [size] that starts at a cache line."""
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < size:
            kept = self._kept[purpose, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size]

    def floats(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """Return uninitialized float32 [size]."""
        return self.bytes(purpose, 4 * size, device).view(torch.float32)

    def messages(self, purpose: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return buffers of these sizes, whose payloads (after a header) start at a cache line.

        Kernels write whole lines faster than parts of two.
        """
        starts, end = [], _LINE - HEADER
        for size in sizes:
            starts.append(end)
            end += -(-size // _LINE) * _LINE
        buffer = self.bytes(purpose, end, device)
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
