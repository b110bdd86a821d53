"""Announcement of an experiment before it runs: parameters of the model, time, bytes on disk.

Only what is known is said. Time is steps times the seconds of such steps in results of before, with
the same model, samples, ranks and link. Where there are none, an uncompressed step takes at least
the time of its bytes on an emulated link: every engine sums the gradients of P parameters over W
ranks and lets all ranks know the new parameters, for which a rank sends at least 8 P (W - 1) / W
bytes of float32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from shardlab.config.experiment import Params
from shardlab.config.machine import LOOPBACK, Link
from shardlab.config.run_record import Record, read_records
from shardlab.config.strategy import Strategy
from shardlab.config.sync import repetition_steps
from shardlab.config.timing_record import TimedRun, read_timings
from shardlab.core.errors import UserError
from shardlab.core.host import describe_host
from shardlab.models.shapes import decoder_of, gpt2_config, read_decoder

Jobs = Mapping[str, Sequence[Mapping[str, str]]]
"""wildcards of the jobs that are about to run, by rule"""
_Key = tuple[str | None, int, str]


class _Steps(NamedTuple):
    """Steps of one strategy."""

    steps: int
    strategy: Strategy | None
    """None: without communication"""
    world_size: int
    link: Link | None

    @property
    def key(self) -> _Key:
        """Hash of the strategy, ranks and name of the link, as in results."""
        name = self.link.name if self.link else LOOPBACK
        return self.strategy.hash() if self.strategy else None, self.world_size, name


def announcement(
    params: Params,
    jobs: Jobs | None = None,
    results: Path = Path("results"),
    host: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return lines on the model, the time and the space that an experiment takes.

    Args:
        params: with all sections.
        jobs: None: all of the experiment.
        results: folder with the results of before.
        host: machine whose results count; None: this one.
    """
    parts = [] if jobs is None else [_count(sum(map(len, jobs.values())), "job")]
    if jobs is None:
        pairs = product(params.strategies, params.seeds)
        jobs = {
            "train": [{"run": run, "seed": str(seed)} for run, seed in pairs],
            "timing": [{"timing": name} for name in params.timings],
            "trial": [{"round": number} for number in params.rounds],
        }
    steps_each = f" of {params.train.steps} steps"
    names = {"train": ("training run", steps_each), "timing": ("timing",), "trial": ("race",)}
    parts += [_count(len(jobs[rule]), *name) for rule, name in names.items() if jobs.get(rule)]
    lines, steps = [", ".join(parts)], [*_steps(params, jobs)]
    if not steps:
        return lines
    size = _parameters(params)
    found = _records(results, host or describe_host())
    lines += _time_lines(steps, _earlier(params, size, found), size)
    for run in dict.fromkeys(job["run"] for job in jobs.get("train", ())):
        left_out = params.strategies[run].gradients.left_out(params.train.steps)
        lines += [f"warning: {run}: {left_out}"] if left_out else []
    if size is not None:
        tokens = params.tokenize.for_model(params.model).tokens if params.model.shape else None
        words = f" with {tokens:,} tokens" if tokens else ""
        lines.insert(0, f"model {params.model.name}: {_million(size)} parameters{words}")
        runs = len(jobs.get("train", ()))
        if runs:
            models = _count(runs, "trained model")
            lines.append(f"{models}: {_bytes(4 * size * runs)} on disk")
    return lines


def _parameters(params: Params) -> int | None:
    """Return the number of parameters; None where it takes transformers or a tokenizer's file."""
    model, vocabulary = params.model, params.tokenize.for_model(params.model).tokens
    if model.shape is None:
        decoder = read_decoder(model.pretrained or model.config or "")
    elif vocabulary is None:
        return None
    else:
        sizes = {"vocab_size": vocabulary, "n_positions": params.train.sequence_length}
        decoder = decoder_of(gpt2_config(*model.shape, **sizes), "model")
    return decoder.parameters if decoder else None


def _steps(params: Params, jobs: Jobs) -> Iterator[_Steps]:
    train, strategies = params.train, params.all_strategies()
    count = train.steps + train.audit_steps + train.profiled_steps
    for job in jobs.get("train", ()):
        run = job["run"]
        yield _Steps(count, strategies[run], train.world_size, train.link)
    for job in jobs.get("timing", ()):
        for part in params.timings[job["timing"]].parts(job["timing"]).values():
            timed = [None, *(strategies[run] for run in part.runs)]
            rounds = repetition_steps([each.sync if each else None for each in timed])
            for strategy, steps in zip(timed, rounds, strict=True):
                count = part.repetitions * steps
                yield _Steps(count, strategy, part.world_size, part.link)


def _earlier(
    params: Params, size: int | None, found: Iterable[Record | TimedRun]
) -> dict[_Key, float]:
    """Return the seconds of steps in results of before, those of training runs before others."""
    train, known = params.train, dict[_Key, float]()
    wanted = params.model.name, train.sequence_length, train.batch_size, train.accumulation
    for run in found:
        workload = run.model, run.sequence_length, run.batch_size, run.accumulation
        if workload == wanted and size in (None, run.parameters):
            ms = fmean(run.step_ms) if isinstance(run, TimedRun) else run.step_ms_mean
            known.setdefault((run.strategy_hash, run.world_size, run.link), ms / 1e3)
    return known


def _records(results: Path, host: Mapping[str, Any]) -> Iterator[Record | TimedRun]:
    """Yield the records of this machine, those of training runs first."""
    trained, timings = results / "results.jsonl", sorted(results.glob("timings/*.jsonl"))
    try:
        records = read_records(trained) if trained.exists() else []
        timed = chain(*(read_timings(path, "time again") for path in timings))
        found: list[Record | TimedRun] = [r for r in records if isinstance(r, Record)]
        found += timed
    except UserError:  # of another version: this run writes them anew
        return
    for run in found:
        if all(run.host.get(key) == host[key] for key in ("cpu", "cores")):
            yield run


def _time_lines(
    steps: Sequence[_Steps], known: Mapping[_Key, float], size: int | None
) -> Iterator[str]:
    measured = [each.steps * known[each.key] for each in steps if each.key in known]
    if measured:
        yield f"{_duration(sum(measured))} of steps, as in earlier results of this machine"
    least = sum(each.steps * _least_s(each, size) for each in steps if each.key not in known)
    if least:
        time = _duration(least)
        yield f"at least {time} of steps, by the bytes of uncompressed gradients over their link"


def _least_s(steps: _Steps, size: int | None) -> float:
    """Return the seconds that the bytes of a step take at least; 0 where nothing is known."""
    link, full = steps.link, steps.strategy and steps.strategy.canonical()
    if link is None or size is None or full is None or link.ranks_per_node > 1:
        return 0.0
    narrow = full.param_dtype not in ("auto", "fp32") or full.reduce_dtype != "fp32"
    if narrow or full.weights or full.sync or not full.gradients.plain():
        return 0.0
    sent = 8 * size * (steps.world_size - 1) / steps.world_size
    return sent * 8 / link.bits_per_second


def _count(number: int, what: str, rest: str = "") -> str:
    return f"{number} {what}{'s' if number != 1 else ''}{rest}"


def _million(count: int) -> str:
    return f"{count / 1e6:,.2g} million" if count < 1e7 else f"{count / 1e6:,.0f} million"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99 else f"{seconds / 60:,.0f} minutes"
