"""Links between ranks: parameters of emulated links, and names of links in records."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from shardlab.core.document import Document
from shardlab.core.errors import UserError

LOOPBACK = "loopback"
"""Link name in records for ranks of one machine without an emulated link."""
FRAME_HEADERS = 66
"""Header bytes of a frame: Ethernet 14, IP 20, TCP with time stamps 32."""
_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def connection_name(link: "Link | None", nodes: int) -> str:
    """Return the name in records of the connection between ranks on `nodes` nodes."""
    if link is not None:
        return link.name
    return LOOPBACK if nodes == 1 else f"network of {nodes} nodes"


def bits_per_second(rate: str) -> int:
    """`100mbit` -> 100_000_000.

    Raises:
        UserError: The rate is not a positive number of kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmg])bit", rate)
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits == 0:
        raise UserError(
            f"link rate {rate!r}: write a number and its unit, such as 100mbit or 1gbit"
        )
    return bits


def bucket_bytes(bits: int) -> int:
    """Return the bytes that an idle link passes at once, before its rate limits it.

    The bucket is large enough for a busy machine to refill it in time.
    """
    return max(64 << 10, bits // 8 // 500)


def _checked(rate: Any) -> Any:
    rates = tuple(rate) if isinstance(rate, list | tuple) else (rate,)
    for node_rate in rates:
        bits_per_second(str(node_rate))
    return rates if isinstance(rate, list) else rate


def _or_rate(schema: dict[str, Any]) -> None:
    """Let the JSON schema of a link accept a text, its rate."""
    rate = {"type": "string", "description": "Rate of the link, such as 100mbit."}
    mapping = dict(schema)
    schema.clear()
    schema["anyOf"] = [rate, mapping]


class Link(Document):
    """One full-duplex link per node, all connected to one switch; a text is its rate."""

    model_config = ConfigDict(json_schema_extra=_or_rate)

    rate: Annotated[
        str | Annotated[tuple[str, ...], Field(min_length=1)], BeforeValidator(_checked)
    ]
    """Rate per direction, such as 100mbit or 1gbit, or a list with a rate for each node."""
    delay_ms: float = Field(0, ge=0)
    """Latency of a message between nodes, in milliseconds."""
    ranks_per_node: int = Field(1, ge=1)
    """Consecutive ranks of a node; they share its link, and use loopback among each other."""

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
        """Bits per second per direction of the slowest node, for which collectives wait."""
        return min(map(bits_per_second, [self.rate] if isinstance(self.rate, str) else self.rate))

    def rates_of_nodes(self, world_size: int) -> tuple[int, ...]:
        """Return the bits per second per direction of each node.

        Raises:
            UserError: The ranks do not fill the nodes or are on one node, or the number of rates
                is not the number of nodes.
        """
        nodes, remainder = divmod(world_size, self.ranks_per_node)
        if remainder:
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
