"""The cheapest price of a device-hour, from the public catalogue of `gpuhunt`."""

import logging
import re
import socket

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.predict.devices import DEVICES

_GIB = 2**30


class Offer(Document):
    """A node to rent on demand, of those of a device and a number of them the cheapest."""

    price: float
    """US dollars of a device-hour"""
    provider: str
    instance: str
    region: str
    catalogue: str
    """version of the provider's catalogue, which begins with its date: YYYYMMDD"""
    providers: int
    """number of providers whose catalogues were read"""


def cheapest_offer(device: str, per_node: int, timeout_s: float = 20.0) -> Offer:
    """Return the cheapest on-demand offer of nodes with so many devices, of `DEVICES`.

    Args:
        timeout_s: longest wait for an answer of the catalogue's server.

    Raises:
        UserError: gpuhunt is absent, cannot download its catalogue, or has no such node.
    """
    if device not in DEVICES:
        raise UserError(f"--price gpuhunt: no offer of --device {device}: give --price in a number")
    try:
        import gpuhunt
    except ModuleNotFoundError:
        raise UserError("--price gpuhunt: pip install 'shardlab[prices]'") from None
    # it logs the traceback of each provider that fails
    logging.getLogger("gpuhunt").setLevel(logging.CRITICAL)
    # prices of the catalogue itself, without a larger CPU for the same device
    catalog = gpuhunt.Catalog(balance_resources=False)
    # gpuhunt names none, and would wait for minutes where a firewall drops what is sent
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        catalog.load()
    except gpuhunt.GPUHuntError as error:
        reason = f"{error}: {error.__cause__}"
        raise UserError(
            f"--price gpuhunt: {reason}; connect this machine to the internet, or give --price in "
            "a number"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout_before)
    memory = DEVICES[device].memory / _GIB
    items = catalog.query(
        provider=[*catalog.catalog],
        gpu_name=catalogue_name(device),
        # two sizes of a device differ by a factor; those of one, as 270 and 288 GB, by little
        min_gpu_memory=0.9 * memory,
        max_gpu_memory=1.1 * memory,
        min_gpu_count=1,
        spot=False,
    )
    nodes = [item for item in items if item.gpu_count == per_node]
    if not nodes:
        counts = sorted({item.gpu_count for item in items})
        has = f"only nodes of {', '.join(map(str, counts))}: change --nodes" if counts else "none"
        raise UserError(
            f"--price gpuhunt: of nodes with {per_node} {device} it has {has}, or give --price in "
            "a number"
        )
    best = min(nodes, key=lambda item: (item.price, item.provider, item.instance_name))
    return Offer(
        price=best.price / per_node,
        provider=best.provider,
        instance=best.instance_name,
        region=best.location,
        catalogue=catalog.catalog[best.provider].version,
        providers=len(catalog.catalog),
    )


def catalogue_name(device: str) -> str:
    """Return gpuhunt's name of a device of `DEVICES`, which has no memory in it.

    >>> catalogue_name("a100-80g"), catalogue_name("rtx-pro-6000")
    ('A100', 'RTXPRO6000')
    """
    return re.sub(r"-\d+g$", "", device).replace("-", "").upper()
