"""CPU time that other processes used during a timing."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from shardlab.core.document import Document

THRESHOLD = 0.2
"""Share of the CPUs of the ranks above which a timing is marked wherever it is shown or used. On
two cores, Snakemake's own process takes up to 0.15, and a second timing a half or more."""


class Contention(Document):
    """Shares of the time of the CPUs that the ranks may run on, on the machine with most of it."""

    foreign: float
    """Share used by processes outside of the run."""
    stolen: float
    """Share that the hypervisor gave to other virtual machines (steal in proc_stat(5))."""

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]]) -> Self | None:
        """Return the contention during a timing; None where /proc/stat counts nothing.

        Args:
            ranks: `shardlab.core.host.CpuTimes` of all ranks, over the same seconds.
        """
        machines: dict[str, list[dict[str, Any]]] = {}
        for times in ranks:
            machines.setdefault(times["machine"], []).append(times)
        by_machine = [cls._of_machine(of_machine) for of_machine in machines.values()]
        counted = [contention for contention in by_machine if contention is not None]
        if len(counted) < len(by_machine):
            return None
        return max(counted, key=lambda contention: contention.foreign + contention.stolen)

    @classmethod
    def _of_machine(cls, ranks: Sequence[dict[str, Any]]) -> Self | None:
        cpus = {str(cpu) for times in ranks for cpu in times["cpus"]}
        longest = max(ranks, key=lambda times: float(times["seconds"]))
        busy, stolen = (
            sum(s for cpu, s in longest[key].items() if cpu in cpus) for key in ("busy", "stolen")
        )
        by_ranks = sum(times["own"] for times in ranks)
        if by_ranks and not busy:
            return None  # /proc/stat counts nothing
        total = longest["seconds"] * len(cpus)
        return cls(foreign=max(0.0, busy - by_ranks) / total, stolen=stolen / total)

    def __str__(self) -> str:
        return f"others used {100 * (self.foreign + self.stolen):.0f} % of its CPUs"


def disturbed(used: Contention | None) -> bool:
    """Return whether a timing with this contention is marked."""
    return used is not None and used.foreign + used.stolen > THRESHOLD


def warnings_of(timed: Iterable[tuple[str, Contention | None]]) -> list[str]:
    """Return a sentence for each timing that was disturbed, or has an unknown contention.

    Args:
        timed: names of timings with their contention.
    """
    warnings = []
    for name, used in dict(timed).items():
        if used is None:
            warnings.append(f"{name}: the load of others during it is unknown")
        elif disturbed(used):
            warnings.append(f"{name}: {used} during it")
    return warnings
