"""Links between ranks: emulated ones as parameters say them, and their names in records."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

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


def _checked(rate: Any) -> Any:
    rates = tuple(rate) if isinstance(rate, list | tuple) else (rate,)
    for each in rates:
        bits_per_second(str(each))
    return rates if isinstance(rate, list) else rate


def _or_rate(schema: dict[str, Any]) -> None:
    """Let a JSON schema of links accept the rate alone."""
    rate = {"type": "string", "description": "the rate alone, such as 100mbit"}
    mapping = dict(schema)
    schema.clear()
    schema["anyOf"] = [rate, mapping]


class Link(Document):
    """One full-duplex link per node, all connected to one switch; as text its rate alone."""

    model_config = ConfigDict(json_schema_extra=_or_rate)

    rate: Annotated[
        str | Annotated[tuple[str, ...], Field(min_length=1)], BeforeValidator(_checked)
    ]
    """rate per direction, such as 100mbit or 1gbit; or a list: one for each node"""
    delay_ms: float = Field(0, ge=0)
    """latency of a message between nodes"""
    ranks_per_node: int = Field(1, ge=1)
    """so many consecutive ranks are a node: they share its link, and use loopback among them"""

    @model_validator(mode="before")
    @classmethod
    def _of_rate(cls, value: Any) -> Any:
        # a number lacks its unit, which the rate says
        return {"rate": str(value)} if isinstance(value, str | int | float) else value

    @property
    def name(self) -> str:
        """Name of the link in records."""
        name = self.rate if isinstance(self.rate, str) else "/".join(self.rate)
        if self.delay_ms:
            name += f" + {self.delay_ms:g} ms"
        return name if self.ranks_per_node == 1 else f"{name}, {self.ranks_per_node} ranks per node"

    @property
    def bits_per_second(self) -> int:
        """Bits per second per direction, of the slowest node: collectives wait for it."""
        return min(map(bits_per_second, [self.rate] if isinstance(self.rate, str) else self.rate))

    def rates_of_nodes(self, world_size: int) -> tuple[int, ...]:
        """Return the bits per second per direction of each node.

        Raises:
            UserError: the ranks are not whole nodes or are one, or there is not one rate for each
                node.
        """
        nodes, rest = divmod(world_size, self.ranks_per_node)
        if rest:
            raise UserError(
                f"link: {world_size} ranks are not whole nodes of {self.ranks_per_node}: choose a "
                "divisor for ranks_per_node"
            )
        if nodes == 1 < world_size:
            raise UserError(
                f"link: all {world_size} ranks are one node, whose link they would not use: lower "
                "ranks_per_node, or remove link"
            )
        if isinstance(self.rate, str):
            return (bits_per_second(self.rate),) * nodes
        if len(self.rate) != nodes:
            raise UserError(
                f"link: {len(self.rate)} rates for {nodes} nodes: give one rate, or one for each "
                "node"
            )
        return tuple(map(bits_per_second, self.rate))
