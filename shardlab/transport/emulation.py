"""A link between the ranks of this machine, emulated as well as this process is allowed to."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.experiment.link import Link
from shardlab.records.run import LinkEmulation
from shardlab.transport.link_throttle import LinkThrottle
from shardlab.transport.links import Links


class Loopback:
    """Where ranks talk whose link is emulated inside of themselves."""

    def enter(self, rank: int) -> str:
        """Stays where it is; returns the name of the network interface."""
        return "lo"

    def is_cut(self) -> bool:
        """Nobody can unplug it."""
        return False


class Emulation(NamedTuple):
    """How a link is emulated: what the launcher and the collectives of each rank have to know."""

    links: Links | Loopback | None
    """for `shardlab.launch.launch`"""
    pace: LinkThrottle | None
    """for `shardlab.engines.build.build_engine`, in the process of each rank"""
    kind: LinkEmulation


@contextmanager
def emulated(link: Link | None, world_size: int) -> Iterator[Emulation]:
    """The links of `world_size` ranks while the block runs; without a link, nothing.

    Network namespaces hold the bytes back where this process may make them; elsewhere the
    collectives of each rank do, and it is said once. The delay is the collectives' in both cases.

        with emulated(link, 2) as emulation:
            launch(partial(worker, emulation.pace), 2, threads=1, timeout_s=60,
                   links=emulation.links)
    """
    if link is None:
        yield Emulation(None, None, "none")
        return
    with ExitStack() as stack:
        try:
            links = stack.enter_context(Links(world_size, link))
        except UserError as error:
            say(f"link of {link.name}: the ranks themselves hold their bytes back ({error})")
            everything = LinkThrottle(link.delay_ms, link.bits_per_second)
            emulation = Emulation(Loopback(), everything, "in-process")
        else:
            delay = LinkThrottle(link.delay_ms) if link.delay_ms else None
            emulation = Emulation(links, delay, "namespaces")
        yield emulation
