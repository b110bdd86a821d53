"""What the ledger says that a rank sends, against what the interface of its own link counts.

    python -m benchmarks.wire [CODEC ...] [--world-size W ...] [--preset NAME] [--rate RATE]
                              [--steps S] [--work FOLDER]

Every codec reduces the gradients of a model that DDP trains; other engines stand beside it without
a codec. The interface counts Ethernet frames, whose headers (Ethernet 14 bytes, IP 20, TCP with
timestamps 32) nobody chose to send: the last column leaves them out, of acknowledgements too. What
is left are gloo's headers, and what torch sends by itself in a step. From 275mbit on the counter
sees the packets of up to 64 KiB that the kernel makes, below that those of 1514 bytes.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.children import on_ranks
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.engines.build import build_engine
from shardlab.engines.common.base import Engine, Optimization
from shardlab.environment.host import describe_host, git_revision
from shardlab.experiment.link import FRAME_HEADERS, Link
from shardlab.experiment.schema import Model
from shardlab.models.build import build_model
from shardlab.report.numbers import figure
from shardlab.report.tables import text_table
from shardlab.strategy.codec_options import SPECS
from shardlab.strategy.strategy import parse_strategy
from shardlab.transport.link_emulation import Links, interface_bytes, interface_frames

_OPTIONS = {"threshold": ":threshold=1e-3"}
"""of a codec that is nothing without"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp1": {"engine": "fsdp1"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2, exchange": {"engine": "fsdp2", "gradients": {"route": "exchange"}},
    "fsdp2, int8 both ways": {
        "engine": "fsdp2",
        "gradients": {"codec": "int8"},
        "weights": {"codec": "int8"},
    },
    "manual": {"engine": "manual"},
    **{
        name: {"engine": "ddp", "gradients": {"codec": name + _OPTIONS.get(name, "")}}
        for name in SPECS
    },
}
_VOCABULARY, _LENGTH, _SAMPLES, _UNCOUNTED = 50257, 32, 1, 2
_ARRIVED_S = 0.3
"""what a rank has handed to the kernel is on the link by then"""


class Case(NamedTuple):
    """What all strategies of one table have in common."""

    world_size: int
    preset: str
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CODEC", help="or another row; default: all")
    parser.add_argument("--world-size", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--preset", default="10m")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(".work/benchmarks"), help="for results")
    args = parser.parse_args()
    unknown = set(args.names) - set(STRATEGIES)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))}: not one of {', '.join(STRATEGIES)}")
    link = validate(Link, {"rate": args.rate}, "--rate")
    results: dict[str, Any] = {"host": describe_host(), "revision": git_revision()}
    for world_size in args.world_size:
        case, found = Case(world_size, args.preset, args.steps), {}
        with Links(world_size, link) as links:
            for name in args.names or STRATEGIES:
                found[name] = _measured(case, name, links)
                say(f"benchmarks: {name}, {world_size} ranks: {found[name]}")
        title = f"{world_size} ranks, {args.preset}, {args.rate}"
        results[title] = found
        write_json(args.work / "wire.json", results)
        print(f"{title}\n\n{_table(title, found)}")


def _measured(case: Case, name: str, links: Links) -> dict[str, float]:
    """Bytes per step, means over ranks."""
    ranks = on_ranks(case.world_size, partial(_run, case, name), links=links)
    return {key: sum(rank[key] for rank in ranks) / len(ranks) for key in ranks[0]}


def _run(case: Case, name: str, group: dist.ProcessGroup) -> dict[str, float]:
    preset = validate(Model, {"preset": case.preset}, "--preset")
    model = build_model(preset, _VOCABULARY, _LENGTH, 0, seed=1).whole()
    strategy = parse_strategy(STRATEGIES[name])
    engine = build_engine(model, strategy, Optimization(weight_decay=0.1, clip=1.0), group)
    _steps(engine, _UNCOUNTED, group)
    engine.ledger.reset()
    before = _counters(group)
    _steps(engine, case.steps, group)
    after = _counters(group)
    accounts = engine.ledger.accounts.values()
    return {
        "ledger": sum(account.bytes_wire for account in accounts) / case.steps,
        "interface": (after[0] - before[0]) / case.steps,
        "frames": (after[1] - before[1]) / case.steps,
    }


def _steps(engine: Engine, steps: int, group: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    for _ in range(steps):
        shape = (_SAMPLES, _LENGTH + 1)
        engine.step([torch.randint(_VOCABULARY, shape, generator=generator)], 1e-3)


def _counters(group: dist.ProcessGroup) -> tuple[int, int]:
    """Bytes and frames that this rank has sent so far."""
    dist.barrier(group)
    time.sleep(_ARRIVED_S)
    nbytes, frames = interface_bytes(), interface_frames()
    assert nbytes is not None and frames is not None, "the rank has entered its link"
    return nbytes, frames


def _table(title: str, measured: dict[str, dict[str, float]]) -> str:
    headings = [
        "gradients, or engine",
        "ledger, MB per step",
        "interface, MB per step",
        "interface / ledger",
        "without headers of frames",
    ]
    rows = []
    for name, found in measured.items():
        ledger, counted = found["ledger"], found["interface"]
        payload = counted - FRAME_HEADERS * found["frames"]
        ratios = [f"{each / ledger:.4f}" for each in (counted, payload)]
        rows.append([name, figure(ledger / 1e6, 4), figure(counted / 1e6, 4), *ratios])
    return text_table(title, headings, rows).markdown()


if __name__ == "__main__":
    main()
