"""Hardware of a machine, as detected and as parameters say it."""

from shardlab.core.document import Document


class Gpu(Document):
    """One GPU."""

    name: str
    """as the driver has it"""
    memory_gb: float
    """1 GB = 10^9 B"""
    link: str | None = None
    """to the other GPUs, such as NVLink 4; detected: whether each reads the others' memory"""
    peak_tflops: float | None = None
    """of dense matrix products in the type that computes, 10^12 operations per second; never
    detected. Only the prompt of the search's judge has it: no utilization or forecast depends on
    it"""


class Connection(Document):
    """Ranks that exchange messages, as measured."""

    world_size: int
    """number of ranks"""
    link: str
    """that they use, by name"""
    mb_per_s: float
    """that a rank sends, in the largest messages"""
    latency_us: float
    """duration of the smallest exchange"""


class Hardware(Document):
    """A machine; null: unknown, or in the parameters: as detected."""

    cpu: str | None = None
    """name of the processor"""
    cores: int | None = None
    """usable CPUs"""
    numa_nodes: int | None = None
    """number of NUMA nodes"""
    caches_kb: dict[str, int] | None = None
    """of the first core, by level and type"""
    memory_gb: float | None = None
    """of the host"""
    copy_gb_per_s: float | None = None
    """that a rank reads and writes when it copies a large vector, while all ranks do"""
    gpus: list[Gpu] | None = None
    """the GPUs of the machine"""
    connections: list[Connection] | None = None
    """measured exchanges, by ranks and link"""

    def changed_by(self, given: "Hardware") -> "Hardware":
        """Return the hardware with what is given in place of what was detected."""
        known = {name: getattr(given, name) for name in Hardware.model_fields}
        return self.model_copy(update={n: value for n, value in known.items() if value is not None})

    def memory_of_rank_gb(self, world_size: int) -> float | None:
        """Return the memory of the smallest GPU, or the ranks' equal parts of the host's."""
        if self.gpus:
            return min(gpu.memory_gb for gpu in self.gpus)
        return None if self.memory_gb is None else self.memory_gb / world_size
