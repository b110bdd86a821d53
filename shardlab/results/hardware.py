"""Hardware of a machine, detected or set by parameters."""

from shardlab.core.document import Document


class Gpu(Document):
    """One GPU."""

    name: str
    """Name by the driver."""
    memory_gb: float
    """Memory; 1 GB = 10^9 B."""
    link: str | None = None
    """Link to the other GPUs, such as NVLink 4; detected: whether GPUs can access each other's
    memory."""
    peak_tflops: float | None = None
    """Peak of dense matrix products in the compute dtype, 10^12 operations per second; never
    detected. Only the prompt of the search's judge has it; no utilization and no forecast depends
    on it."""


class Connection(Document):
    """Measured all-to-all exchange of messages between ranks."""

    world_size: int
    """Number of ranks."""
    link: str
    """Name of the link."""
    mb_per_s: float
    """Rate at which a rank sends, with the largest messages."""
    latency_us: float
    """Duration of the smallest exchange."""


class Hardware(Document):
    """A machine; null: unknown, or, in the parameters, as detected."""

    cpu: str | None = None
    """Name of the processor."""
    cores: int | None = None
    """Number of usable CPUs."""
    numa_nodes: int | None = None
    """Number of NUMA nodes."""
    caches_kb: dict[str, int] | None = None
    """Caches of the first core, by level and type."""
    memory_gb: float | None = None
    """Memory of the host."""
    copy_gb_per_s: float | None = None
    """Rate at which a rank reads and writes while all ranks copy large vectors."""
    gpus: list[Gpu] | None = None
    """GPUs of the machine."""
    connections: list[Connection] | None = None
    """Measured exchanges, by ranks and link."""

    def changed_by(self, settings: "Hardware") -> "Hardware":
        """Return the detected hardware with the values that the settings replace."""
        values = {name: getattr(settings, name) for name in Hardware.model_fields}
        changes = {name: value for name, value in values.items() if value is not None}
        return self.model_copy(update=changes)

    def memory_of_rank_gb(self, world_size: int) -> float | None:
        """Return the memory of the smallest GPU, or a rank's equal part of the host memory."""
        if self.gpus:
            return min(gpu.memory_gb for gpu in self.gpus)
        return None if self.memory_gb is None else self.memory_gb / world_size
