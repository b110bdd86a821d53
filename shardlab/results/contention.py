"""CPU time that others used while something was timed."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from shardlab.core.document import Document

THRESHOLD = 0.2
"""of the CPUs of the ranks; above it, a timing is marked wherever it is shown or used. On two cores
Snakemake's own process takes up to 0.15, a second timing a half or more"""


class Contention(Document):
    """Shares of the time of the CPUs that the ranks may run on, on the machine with most of it."""

    foreign: float
    """used by processes that are not the run's"""
    stolen: float
    """given to other virtual machines by the hypervisor (steal in proc_stat(5))"""

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]]) -> Self | None:
        """Return the contention during a timing; None where /proc/stat counts nothing.

        Args:
            ranks: `shardlab.core.host.CpuTimes` of all ranks, over the same seconds.
        """
        machines: dict[str, list[dict[str, Any]]] = {}
        for each in ranks:
            machines.setdefault(each["machine"], []).append(each)
        found = [cls._of_machine(those) for those in machines.values()]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        return max(known, key=lambda each: each.foreign + each.stolen)

    @classmethod
    def _of_machine(cls, ranks: Sequence[dict[str, Any]]) -> Self | None:
        cpus = {str(cpu) for each in ranks for cpu in each["cpus"]}
        longest = max(ranks, key=lambda each: float(each["seconds"]))
        busy, stolen = (
            sum(s for cpu, s in longest[key].items() if cpu in cpus) for key in ("busy", "stolen")
        )
        own = sum(each["own"] for each in ranks)
        if own and not busy:
            return None
        total = longest["seconds"] * len(cpus)
        return cls(foreign=max(0.0, busy - own) / total, stolen=stolen / total)

    def __str__(self) -> str:
        return f"others used {100 * (self.foreign + self.stolen):.0f} % of its CPUs"


def disturbed(used: Contention | None) -> bool:
    """Return whether times measured meanwhile are to be marked."""
    return used is not None and used.foreign + used.stolen > THRESHOLD


def warnings_of(timed: Iterable[tuple[str, Contention | None]]) -> list[str]:
    """Return a sentence for each timing that was disturbed, or of which that is unknown.

    Args:
        timed: names of timings with their contention.
    """
    found = []
    for name, used in dict(timed).items():
        if used is None:
            found.append(f"{name}: the load of others during it is unknown")
        elif disturbed(used):
            found.append(f"{name}: {used} during it")
    return found
