"""Break the steps in traces of torch.profiler down, whoever wrote them and labelled or not: where
the time of each rank went, and what hiding the communication would give."""

from collections.abc import Sequence
from pathlib import Path

from shardlab.core.files import write_text
from shardlab.profiling.job import break_down
from shardlab.profiling.table import conclude, page, render, write_rows


def main(paths: Sequence[str], *, csv: str | None = None, html: str | None = None) -> None:
    """Print a line per rank, the kinds of communication, what is unknown, and the conclusion."""
    job = break_down(paths)
    if csv is not None:
        write_rows(Path(csv), job.steps)
    if html is not None:
        write_text(html, page(job))
    print("\n".join([*render(job), "", conclude(job)]))
