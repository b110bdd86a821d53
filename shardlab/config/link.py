"""Emulated network links: rate and delay."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from shardlab.core.document import Document
from shardlab.core.errors import UserError

LOOPBACK = "loopback"
"""link name in records for ranks of one machine without an emulated link"""
FRAME_HEADERS = 66
"""bytes of a frame that carry no payload: Ethernet 14, IP 20, TCP with time stamps 32"""
_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def connection_name(link: "Link | None", nodes: int) -> str:
    """Return what records call the connection of ranks on so many nodes."""
    if link is not None:
        return link.name
    return LOOPBACK if nodes == 1 else f"network of {nodes} nodes"


def bits_per_second(rate: str) -> int:
    """`100mbit` -> 100_000_000.

    Raises:
        UserError: not a positive number of kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmg])bit", rate)
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits == 0:
        raise UserError(
            f"link rate {rate!r}: write a number and its unit, such as 100mbit or 1gbit"
        )
    return bits


def bucket_bytes(bits: int) -> int:
    """Return the burst bytes that an idle link passes at once before its rate holds.

    A small bucket leaves a busy machine no time to refill it.
    """
    return max(64 << 10, bits // 8 // 500)


def _checked(rate: str) -> str:
    bits_per_second(rate)
    return rate


class Link(Document):
    """One full-duplex link per rank, all connected to one switch."""

    rate: Annotated[str, AfterValidator(_checked)]
    """rate per direction, such as 100mbit or 1gbit"""
    delay_ms: float = Field(0, ge=0)
    """latency of a message"""

    @property
    def name(self) -> str:
        """Name of the link in records."""
        return self.rate if self.delay_ms == 0 else f"{self.rate} + {self.delay_ms:g} ms"

    @property
    def bits_per_second(self) -> int:
        """Bits per second per direction."""
        return bits_per_second(self.rate)
