"""The columns of the tables on timings."""

import math
from collections.abc import Callable

from shardlab.experiment.link import FRAME_HEADERS
from shardlab.report.cells import MB, RUN, Column, Row, plain, share, where_known
from shardlab.report.numbers import ABSENT, fixed, plus_minus, within


def ratio(name: str, places: int = 2) -> Callable[[Row], str]:
    """A ratio with its interval; 1 alone where something is compared with itself."""

    def cell(row: Row) -> str:
        mean, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        if math.isnan(mean):
            return ABSENT
        return "1" if mean == low == high == 1 else within(mean, low, high, places)

    return cell


def _part(name: str, places: int = 1) -> Callable[[Row], str]:
    return lambda row: ABSENT if math.isnan(row[name]) else fixed(100 * row[name], places)


def _of_bound(row: Row) -> str:
    if math.isnan(row["bound_ratio"]):
        return ABSENT
    if row["bound_ratio_low"] == row["bound_ratio_high"] == 1:
        return "100"
    mean, low, high = (100 / row[f"bound_ratio{end}"] for end in ("", "_high", "_low"))
    return within(mean, low, high, 1)


_LINK = Column("link", "", lambda row: str(row["link"]), "how the ranks were joined", False)
_RANKS = Column("ranks", "", lambda row: str(row["world_size"]), "processes that train together")
_STEP = Column(
    "timed step",
    "ms",
    lambda row: plus_minus(row["step_ms"], row["step_ms_sd"]),
    "wall time of a step of the slowest rank, all ranks having begun together; mean ± standard "
    "deviation over rounds, in each of which every run made one step",
)
_TOKENS = Column(
    "timed throughput", "tokens/s", plain("tokens_per_s"), "tokens of a timed step over all ranks"
)
_EXPOSED = Column(
    "exposed share",
    "% of step",
    share("exposed_share"),
    "communication that no compute hid, of the traced steps of a timing",
)
_BACKWARD = Column(
    "in backward",
    "% of backward",
    share("backward_comm_share"),
    "the share of communication inside the backward pass",
)

SCALING = [
    RUN,
    _RANKS,
    _STEP,
    _TOKENS,
    Column(
        "efficiency",
        "% of one rank",
        _part("efficiency"),
        "tokens per second and rank against the same run on one rank; it contains that ranks share "
        "cores and memory bandwidth of one machine",
    ),
    Column(
        "against no comm.",
        "%",
        _of_bound,
        "time of a step without communication, in which each of as many ranks trains the whole "
        "model by itself at the same time, over that of the run; with its 95 % interval by rounds",
    ),
    _BACKWARD,
    _EXPOSED,
]

TIMED = [
    RUN,
    _RANKS,
    _LINK,
    _STEP,
    Column(
        "timed step / baseline",
        "",
        ratio("step_ratio", 3),
        "geometric mean of the ratios to the baseline round by round, with its 95 % interval",
    ),
    Column(
        "step / no comm.",
        "",
        ratio("bound_ratio"),
        "the same ratio to steps without communication",
    ),
    _TOKENS,
    Column(
        "ledger",
        "MB/step",
        plain("bytes_wire", scale=MB),
        "bytes that one rank sent per step, as the library counts them",
    ),
    Column(
        "interface",
        "MB/step",
        where_known("interface_bytes", scale=MB),
        "bytes that the network interface of one rank sent per step, all headers and "
        "acknowledgements included; known where each rank has an interface of its own",
    ),
    Column(
        "more than ledger",
        "%",
        _part("interface_excess", 2),
        f"how much more the interface counted than the ledger, less the {FRAME_HEADERS} bytes of "
        "headers of each frame: what gloo says about its messages, and what torch sends by itself, "
        "such as the norm of clipped gradients",
    ),
    Column(
        "timed communication",
        "% of step",
        share("comm_share"),
        "share of the traced steps of a timing in which a collective ran",
    ),
    _EXPOSED,
    Column(
        "timed overlap",
        "% of comm.",
        share("overlap"),
        "part of the communication of these steps that ran while compute ran",
    ),
    _BACKWARD,
]
