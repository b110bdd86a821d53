"""Break the steps in traces of torch.profiler down, whoever wrote them and labelled or not: where
the time of each rank went, and what hiding the communication would give."""

from pathlib import Path

from shardlab.core.files import write_text
from shardlab.profiling.job import break_down
from shardlab.profiling.table import conclude, page, render, write_rows
from stages.common import Parser, run_command


def main() -> None:
    """Print a line per rank, the kinds of communication, what is unknown, and the conclusion."""
    parser = Parser("trace", description=__doc__)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="trace of a rank, or a merged one, also .gz; or a folder, which is searched",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row per step and rank")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as one page")
    options = parser.parse_args()
    job = break_down(options.paths)
    if options.csv is not None:
        write_rows(options.csv, job.steps)
    if options.html is not None:
        write_text(options.html, page(job))
    print("\n".join([*render(job), "", conclude(job)]))


if __name__ == "__main__":
    run_command("trace", main)
