"""Memory estimates that are made before a run."""

from shardlab.core.document import Document


class Estimate(Document):
    """Estimated peak memory of a rank in a training step, bytes by category."""

    traced: dict[str, int] | None
    """with fake tensors; None where tracing is not possible"""
    closed_form: dict[str, int]

    @property
    def traced_bytes(self) -> int | None:
        """Sum of the traced categories."""
        return None if self.traced is None else sum(self.traced.values())

    @property
    def closed_form_bytes(self) -> int:
        """Sum of the categories in closed form."""
        return sum(self.closed_form.values())
