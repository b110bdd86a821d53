"""Section on scaling: throughput by ranks, and whether communication is the bottleneck."""

import pandas as pd

from shardlab.config.machine import FRAME_HEADERS
from shardlab.config.run_record import Setting
from shardlab.report.aggregate import verdict
from shardlab.report.evidence import Evidence
from shardlab.report.plots import scaling_plot
from shardlab.report.tables import (
    ABSENT,
    MB,
    RUN,
    Column,
    Figure,
    Row,
    Section,
    interval,
    or_disturbed,
    percent,
    plain,
    plural,
    share,
    spread,
    where_known,
    within,
    words,
)
from shardlab.report.timings import without_link

_HALF = 2.0
"""step over its no-communication bound from which communication takes most of a step"""


def _step_ratio(row: Row) -> str:
    return "1 (baseline)" if row["is_baseline"] else interval("step_ratio", 3)(row)


def _of_bound(row: Row) -> str:
    mean, low, high = (100 / row[f"bound_ratio{end}"] for end in ("", "_high", "_low"))
    if mean != mean:  # NaN: the timing has no bound
        return ABSENT
    return "100" if low == high == 100 else within(mean, low, high, 1)


RANKS = Column("ranks", "", words("world_size"), "number of processes")
LINK = Column("link", "", words("link"), "loopback, or rate and delay of an emulated link", False)
STEP = Column(
    "step",
    "ms",
    or_disturbed(spread("step_ms")),
    "wall time of a step of the slowest rank in a timing; mean ± standard deviation over "
    "repetitions, in each of which every run makes one step",
)
STEP_RATIO = Column(
    "step / baseline",
    "",
    _step_ratio,
    "step time over that of the baseline: geometric mean of the ratios of steps of the same "
    "repetition, with its 95 % confidence interval (Student's t on the logarithms)",
)
THROUGHPUT = Column("throughput", "tokens/s", plain("tokens_per_s"), "tokens of a step, all ranks")
EXPOSED = Column(
    "exposed, timed",
    "% of step",
    share("exposed_share"),
    "communication that did not overlap with compute, in the traced steps of a timing",
)
IN_BACKWARD = Column(
    "in backward",
    "% of backward",
    share("backward_comm_share"),
    "fraction of the backward pass in which a collective ran",
)

SCALING = [
    RUN,
    RANKS,
    STEP,
    THROUGHPUT,
    Column(
        "efficiency",
        "% of one rank",
        share("efficiency"),
        "tokens per second and rank relative to the same run on one rank; ranks of one machine "
        "share its cores and memory bandwidth",
    ),
    Column(
        "of no-comm. bound",
        "%",
        _of_bound,
        "no-communication bound, the step time of as many ranks that each train the whole model "
        "without communication, over the step time; with its 95 % confidence interval over "
        "repetitions",
    ),
    IN_BACKWARD,
    EXPOSED,
]


TIMED = [
    RUN,
    RANKS,
    LINK,
    STEP,
    STEP_RATIO,
    Column(
        "step / no-comm. bound",
        "",
        interval("bound_ratio"),
        "the same ratio to the no-communication bound",
    ),
    THROUGHPUT,
    Column(
        "ledger",
        "MB/step",
        plain("bytes_wire", scale=MB),
        "bytes that a rank sent per step, as the library counts them",
    ),
    Column(
        "interface",
        "MB/step",
        where_known("interface_bytes", scale=MB),
        "bytes that the network interface of a rank sent per step, headers and acknowledgements "
        "included; known if every rank has a network interface",
    ),
    Column(
        "interface excess",
        "%",
        share("interface_excess", 2),
        f"excess of the interface's count over the ledger, less {FRAME_HEADERS} bytes of headers "
        "per frame: control messages of gloo, and what torch sends apart from codecs, such as the "
        "gradient norm",
    ),
    Column(
        "timed communication",
        "% of step",
        share("comm_share"),
        "fraction of the traced steps of a timing in which a collective ran",
    ),
    EXPOSED,
    Column(
        "timed overlap",
        "% of comm.",
        share("overlap"),
        "fraction of the communication of these steps that overlapped with compute",
    ),
    IN_BACKWARD,
]


def scaling(evidence: Evidence) -> Section:
    """Show throughput by ranks, and compare steps with the no-communication bound."""
    rows, baseline = evidence.timing_rows, evidence.baseline
    shared = cores_note(rows)
    return Section(
        "Is communication the bottleneck?",
        sentences=[
            "Timings are measured apart from training: all runs have an engine in the same "
            "processes and their steps are interleaved in random order. The no-communication bound "
            "is the step time of ranks that train without communication.",
            *([shared] if shared else []),
        ],
        items=bottleneck(rows, baseline),
        figures=[
            Figure(
                "scaling",
                "Throughput of all ranks, and the fraction of backward in which a collective ran. "
                "The dotted line is the no-communication bound.",
                scaling_plot(without_link(rows), evidence.runs, baseline),
            )
        ],
        tables=[evidence.timing_table("Scaling", SCALING, scaling_rows(rows))],
    )


def scaling_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the timings without an emulated link, run by run and by ascending ranks."""
    rows = without_link(rows)
    order = {run: number for number, run in enumerate(dict.fromkeys(rows["run"]))}
    keyed = rows.assign(order=rows["run"].map(order))
    return keyed.sort_values(["order", "world_size"], kind="stable")


def bottleneck(rows: pd.DataFrame, baseline: str) -> list[str]:
    """Return a sentence for every timing of the baseline on several ranks."""
    several = rows[(rows["run"] == baseline) & (rows["world_size"] > 1)]
    return [_sentence(row) for _, row in several.iterrows()]


def bottleneck_of(rows: pd.DataFrame, setting: Setting) -> str:
    """Return the sentence for the run, ranks and link of a record."""
    if setting.world_size == 1:
        return "A single rank does not communicate."
    found = rows[
        (rows["run"] == setting.run)
        & (rows["world_size"] == setting.world_size)
        & (rows["link"] == setting.link)
    ]
    if found.empty:
        return (
            f"Whether communication is the bottleneck of {setting.run} is unknown: it is not timed "
            f"on {setting.world_size} ranks (link: {setting.link})."
        )
    return _sentence(found.iloc[0])


def _sentence(row: pd.Series) -> str:
    ratio = [row[f"bound_ratio{end}"] for end in ("", "_low", "_high")]
    saved = max(0.0, 1 - 1 / ratio[0])
    bound = within(mean=ratio[0], low=ratio[1], high=ratio[2], places=2)
    return (
        f"On {row['world_size']} ranks (link: {row['link']}) {_judged(row)} of {row['run']}: its "
        f"step takes {bound} times the no-communication bound, so {percent(saved, 0)} of it is the "
        f"cost of sharding and communication; in the trace {percent(row['exposed_share'], 0)} of "
        "it is exposed communication."
    )


def _judged(row: pd.Series) -> str:
    """Judge by both measures, since the bound leaves out the work of sharding, too."""
    compared = verdict(row["bound_ratio_low"], row["bound_ratio_high"], _HALF)
    if compared == "unknown":
        return "a single repetition cannot show whether communication is the bottleneck"
    traced = "higher" if row["exposed_share"] > 1 / _HALF else "lower"
    if compared != traced:
        return "it is not clear whether communication is the bottleneck"
    return f"communication is {'' if traced == 'higher' else 'not '}the bottleneck"


def cores_note(rows: pd.DataFrame) -> str | None:
    """Return a sentence if ranks had less than a core for each of their threads."""
    crowded = rows[rows["world_size"] * rows["threads"] > rows["cores"]]
    if crowded.empty:
        return None
    most = crowded.loc[crowded["world_size"].idxmax()]
    return (
        f"{plural(most['world_size'], 'rank')} of {plural(most['threads'], 'thread')} shared "
        f"{plural(most['cores'], 'core')}: the efficiency relative to one rank contains this, the "
        "fraction of the no-communication bound does not."
    )
