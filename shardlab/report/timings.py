"""Timed runs to one row per timing and run, and timings grouped by the rate of their link.

The steps of one repetition follow each other directly, so two runs of a timing are compared
repetition by repetition; the uncertainty is that of these ratios, Student's t on their logarithms.
Runs of interleaved timings are compared by `interval.interleaved_ratio`; other runs are not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from shardlab.core.link import FRAME_HEADERS
from shardlab.core.numbers import number, plural
from shardlab.report.aggregate import shows_rounds, with_ends
from shardlab.report.tables import DISTURBED, ONE_DEVICE
from shardlab.results.contention import disturbed
from shardlab.results.interval import Ratio, interleaved_ratio
from shardlab.results.table import step_ratio
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult, shares_cores
from shardlab.strategy.document import Strategy, parse_strategy

_TRACED = [
    "profiled_step_ms",
    "compute_ms",
    "comm_share",
    "exposed_comm_ms",
    "exposed_copy_ms",
    "idle_ms",
    "overlap",
    "backward_comm_share",
]


def timing_table(
    timed: Sequence[TimingResult], baseline: str, turns: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return one row per timing and run, the timings without an emulated link first.

    The order of timings in `timed` does not matter; runs of one timing keep theirs. The first row
    of a timing of several ranks is `ONE_DEVICE`: as many steps as make as many tokens, of the
    no-communication bound of a timing of one rank without a link, with as many micro-batches, that
    took turns with it. Without such a timing, and where ranks share cores, whose loss to each other
    is not communication, there is no such row.

    Args:
        turns: by name of a timing, the name of the one that it took turns with, or its own.

    Columns: timing, run, link, bits_per_second (NaN without an emulated link), delay_ms,
    world_size, accumulation (micro-batches per step), threads, cores, shares_cores (whether ranks
    have less than one for each thread);
    repetitions without the `paused` ones, which count in no other column; disturbed (whether others
    used its CPUs); `step_ms` and its standard deviation over repetitions `step_ms_sd`;
    `tokens_per_s` over all ranks;
    `bytes_raw`, `bytes_wire`, `interface_bytes` and `interface_excess`, the fraction by which
    these, less the headers of frames, exceed `bytes_wire`; the breakdown of the traced steps
    (NaN where exchanges are too rare for these to be like all);
    `step_ratio` to the baseline of the same timing, `alone_ratio` to one device alone,
    `bound_ratio` to its no-communication bound and `codec_ratio` to its run `reference`, the same
    strategy without a codec (empty if there is none), each with `_low` and `_high`; `efficiency`,
    tokens per second and rank over those of the same run on one rank. Unknown values are NaN.
    """
    by_timing: dict[str, list[TimingResult]] = {}
    for run in sorted(timed, key=_order):
        by_timing.setdefault(run.timing, []).append(run)
    turns = turns or {}
    alone = _single_devices(timed, turns)
    table = pd.concat(
        [
            _rows(runs, baseline, alone.get((turns.get(timing), runs[0].accumulation)))
            for timing, runs in by_timing.items()
        ],
        ignore_index=True,
    )
    same = ["run", "accumulation"]
    single = table[(table["world_size"] == 1) & table["bits_per_second"].isna()]
    of_one_rank = single.drop_duplicates(same).set_index(same)["tokens_per_s"]
    one_rank = of_one_rank.reindex(pd.MultiIndex.from_frame(table[same])).to_numpy(float)
    return table.assign(efficiency=table["tokens_per_s"] / table["world_size"] / one_rank)


def _order(run: TimingResult) -> tuple[int, float, int, str]:
    return run.bits_per_second or 0, run.delay_ms, run.world_size, run.timing


def _single_devices(
    timed: Sequence[TimingResult], turns: Mapping[str, str]
) -> dict[tuple[str | None, int], TimingResult]:
    """Return the steps without communication of one rank, by the timing whose turns they took and
    the micro-batches of a step."""
    return {
        (turns[run.timing], run.accumulation): run
        for run in sorted(timed, key=_order, reverse=True)
        if run.run == NO_COMMUNICATION
        and run.world_size == 1
        and run.bits_per_second is None
        and run.timing in turns
    }


def _rows(runs: Sequence[TimingResult], baseline: str, single: TimingResult | None) -> pd.DataFrame:
    runs = [*_without_communication(runs, single), *runs]
    names = [run.run for run in runs]
    by_name = {run.run: run for run in runs}
    reference = references({run.run: run.strategy for run in runs})
    compared = {
        "step_ratio": dict.fromkeys(names, baseline),
        "alone_ratio": dict.fromkeys(names, ONE_DEVICE),
        "bound_ratio": dict.fromkeys(names, NO_COMMUNICATION),
        "codec_ratio": reference,
    }
    parts = [pd.DataFrame([_row(run) for run in runs], index=names)]
    for column, references_by_run in compared.items():
        ratios = [_over(by_name, run, references_by_run.get(run, "")) for run in names]
        parts.append(with_ends(pd.DataFrame(ratios, index=names), column))
    return pd.concat(parts, axis=1).assign(reference=[reference.get(run, "") for run in names])


def _without_communication(
    runs: Sequence[TimingResult], single: TimingResult | None
) -> Iterator[TimingResult]:
    """Yield the tokens of a step of several ranks on one device, without communication; none where
    ranks share cores, or one device took no turns with them."""
    for bound in runs:
        if bound.run != NO_COMMUNICATION or bound.world_size == 1 or shares_cores(bound):
            continue
        if single is not None:
            # with equal batches of a rank as many steps as there are ranks
            share = bound.world_size * bound.tokens_of_rank / single.tokens_of_rank
            step_ms = [share * step for step in single.step_ms]
            changes = {"run": ONE_DEVICE, "step_ms": step_ms, "contention": single.contention}
            yield bound.model_copy(update=changes)


def _over(runs: Mapping[str, TimingResult], run: str, other: str) -> Ratio:
    """Return the ratio of steps, in pairs but for one device, whose repetitions are others."""
    if not {run, other} <= runs.keys():
        return Ratio(math.nan, math.nan, math.nan)
    if run != other and ONE_DEVICE in (run, other):
        return interleaved_ratio(*(runs[name].measured_ms() for name in (run, other)))
    return step_ratio(runs[run], runs[other])


def _row(run: TimingResult) -> dict[str, object]:
    measured = [time for time in run.measured_ms() if not math.isnan(time)]
    step = float(np.mean(measured))
    tokens = run.world_size * run.tokens_of_rank
    counted = math.nan if run.interface_bytes is None else run.interface_bytes
    payload = counted - FRAME_HEADERS * (run.interface_frames or 0)
    traced = {name: getattr(run.breakdown, name) for name in _TRACED}
    traced["exposed_share"] = run.breakdown.exposed_comm_ms / run.breakdown.profiled_step_ms
    if run.run == ONE_DEVICE or (run.strategy and not shows_rounds(run.strategy)):
        traced = dict.fromkeys(traced, math.nan)
    leaving = run.bytes_wire
    if run.ranks_per_node > 1:
        between = sum(account["bytes_between_nodes"] for account in run.ledger.values())
        leaving = run.ranks_per_node * between
    mark = " (in-process)" if run.link_emulation == "in-process" else ""
    return {
        "timing": run.timing,
        "run": run.run,
        "link": run.link + mark,
        "bits_per_second": math.nan if run.bits_per_second is None else run.bits_per_second,
        "delay_ms": run.delay_ms,
        "ranks_per_node": run.ranks_per_node,
        "world_size": run.world_size,
        "accumulation": run.accumulation,
        "threads": run.threads,
        "cores": run.host["cores"],
        "shares_cores": shares_cores(run),
        "repetitions": len(measured),
        "paused": len(run.step_ms) - len(measured),
        "disturbed": disturbed(run.contention),
        "step_ms": step,
        "step_ms_sd": float(np.std(measured, ddof=1)) if len(measured) > 1 else math.nan,
        "tokens_per_s": tokens / step * 1e3,
        "bytes_raw": run.bytes_raw,
        "bytes_wire": run.bytes_wire,
        "interface_bytes": counted,
        "interface_excess": payload / leaving - 1 if leaving else math.nan,
        **traced,
    }


def references(documents: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """Return for every run with a codec the run to beat: the same strategy without a codec.

    An all-to-all route is preferred: gloo's reduce-scatter sends twice the bytes, and beating it is
    no merit of a codec. Runs without a counterpart are left out.

    Args:
        documents: strategies by run; None for the no-communication bound.
    """
    strategies = {run: parse_strategy(s) for run, s in documents.items() if s is not None}
    without = [run for run, strategy in strategies.items() if _is_uncompressed(strategy)]
    without.sort(key=lambda run: strategies[run].gradients.route != "exchange")
    counterparts: dict[str, str] = {}
    for run, strategy in strategies.items():
        same = [other for other in without if _rest(strategies[other]) == _rest(strategy)]
        if same and run not in without:
            counterparts[run] = same[0]
    return counterparts


def _is_uncompressed(strategy: Strategy) -> bool:
    weights = strategy.weights
    return strategy.gradients.plain() and (weights is None or weights.codec.name == "none")


def _rest(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy without its codecs and routes."""
    return strategy.model_dump(mode="json", exclude={"gradients", "weights"})


ALIKE = ["world_size", "delay_ms", "ranks_per_node"]
"""columns that are equal in timings which differ in the rate of the link alone"""


def crossovers(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Group timings that differ in the rate of the link alone, slowest first.

    A timing without an emulated link comes last in its group; groups of those alone are left out.

    Args:
        rows: of `timing_table`.
    """
    ordered = rows.sort_values("bits_per_second", kind="stable", na_position="last")
    groups = [group for _, group in ordered.groupby(ALIKE)]
    return [group for group in groups if group["bits_per_second"].notna().any()]


def group_title(group: pd.DataFrame) -> str:
    """Return the number of ranks of a group of timings, those of a node that has several, and the
    delay if there is one."""
    first = group.iloc[0]
    node = f", {first['ranks_per_node']} per node" if first["ranks_per_node"] > 1 else ""
    delay = f", {first['delay_ms']:g} ms of delay" if first["delay_ms"] else ""
    return f"{plural(first['world_size'], 'rank')}{node}{delay}"


def location(timing: pd.DataFrame) -> str:
    """Return the ranks and the link of the rows of a timing, as in `2 ranks at 100 Mbit/s`."""
    rate, link = timing.iloc[0][["bits_per_second", "link"]]
    mark = " (in-process)" if link.endswith("(in-process)") else ""
    where = f"over {link}" if math.isnan(rate) else f"at {number(rate, 'bit/s')}{mark}"
    return f"{group_title(timing)} {where}"


def link_headings(group: pd.DataFrame) -> dict[str, str]:
    """Return the link of each timing of a group, with a mark if others used its CPUs."""
    busy = set(group.loc[group["disturbed"], "timing"])
    links = group.drop_duplicates("timing").set_index("timing")["link"]
    return {t: f"{link} {DISTURBED}" if t in busy else link for t, link in links.items()}


def without_link(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `timing_table` without an emulated link."""
    return rows[rows["bits_per_second"].isna()]
