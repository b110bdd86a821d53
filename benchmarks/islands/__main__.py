"""Time to one loss: rare synchronisation, compressed and stock data parallelism, and one device.

    python -m benchmarks.islands [STEP ...]

Steps: text (fetch and tokenize), train, larger (some methods with a larger model), time, report;
without a name all of them. Training takes hours; the command can be stopped and goes on. Losses do
not depend on the link, so every run is trained once, on loopback; steps are timed on each link,
interleaved; the report joins both.
"""

import argparse

from benchmarks.islands.methods import METHODS, parameters
from benchmarks.islands.report import write_report
from benchmarks.islands.texts import tokenize
from benchmarks.islands.timing import LINKS, NODES, RARE, time_link
from benchmarks.islands.training import train_all, train_larger

_STEPS = ("text", "train", "larger", "time", "report")


def main() -> None:
    """Do the steps that are named."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("steps", nargs="*", choices=_STEPS, metavar="STEP", help=", ".join(_STEPS))
    links = (*LINKS, *RARE, *NODES)
    parser.add_argument(
        "--links", nargs="+", default=links, choices=links, metavar="LINK", help=", ".join(links)
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        choices=METHODS,
        metavar="METHOD",
        help="to train and to time: " + ", ".join(METHODS),
    )
    parser.add_argument("--seeds", type=int, default=3, help="per method (3)")
    given = parser.parse_args()
    params = parameters()
    for step in given.steps or _STEPS:
        if step == "text":
            tokenize()
        elif step == "train":
            train_all(params, given.methods, given.seeds)
        elif step == "larger":
            train_larger(given.methods)
        elif step == "time":
            for link in given.links:
                time_link(params, given.methods, link)
        else:
            write_report()


if __name__ == "__main__":
    main()
