"""Steps that are traced on every rank, and the traces of all ranks as one."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from shardlab.loop.loop import Loop
from shardlab.profiling.capture.capture import Capture
from shardlab.profiling.capture.merge import merge_traces


def traced_steps(loop: Loop, steps: int) -> bytes:
    """The trace of this rank's next steps, after one that warms the profiler up."""
    with TemporaryDirectory(prefix="shardlab-trace-") as folder:
        path = Path(folder, "trace.json.gz")
        with Capture(steps) as capture:
            for _ in range(capture.calls):
                loop.run(1)
                capture.step()
        capture.export(path)
        return path.read_bytes()


def write_trace_of(ranks: Sequence[bytes], output: Path) -> None:
    """Merges what `traced_steps` returned on each rank, in rank order."""
    with TemporaryDirectory(prefix="shardlab-traces-") as folder:
        paths = []
        for rank, content in enumerate(ranks):
            paths.append(Path(folder, f"rank{rank}.json.gz"))
            paths[-1].write_bytes(content)
        merge_traces(paths, output)
