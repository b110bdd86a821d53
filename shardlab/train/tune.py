"""Tuning of a method: which settings are best for it, and how many steps it takes to a loss.

For each number of micro-batches runs of the first seed climb on the grids of learning rates and
betas. With the best settings more lengths are trained, until the loss to reach is between those of
two. Then every other seed trains the shorter of these two, and the first length.

A run is kept in a file when it ends, so that a search that was killed goes on from there. It stays
valid as long as its strategy, text, model and settings are the same, whatever else changes: its
result names the revision that made it.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardlab.core.content import Content
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import (
    finite,
    read_json,
    sha256_of_file,
    sha256_of_value,
    temporary,
    write_json,
)
from shardlab.core.numbers import plural
from shardlab.core.progress import say
from shardlab.core.types import Betas
from shardlab.data.tokens import open_split, read_manifest
from shardlab.models.settings import Model
from shardlab.results.files import parse_result, read_results, write_results
from shardlab.results.result import Result
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.document import Strategy
from shardlab.train.evaluation import BATCH, evaluate, load_model
from shardlab.train.launch import launch
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Train
from shardlab.train.tune_settings import Method, Tune, lengths_around

_MEANING = (
    *("world_size", "steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps"),
    *("decay", "weight_decay", "betas", "clip", "optimizer"),
)
"""settings of a run that its loss depends on"""
_FIX = "remove it, and its run is trained again"


class Run(NamedTuple):
    """A training run of a method."""

    micro_batches: int
    """of a step, of all ranks together"""
    steps: int
    learning_rate: float
    betas: Betas
    seed: int


@dataclass(frozen=True)
class Tuning:
    """A method, and all that its runs depend on."""

    name: str
    method: Method
    strategy: Strategy
    """that is trained"""
    tune: Tune
    train: Train
    model: Model
    seeds: Sequence[int]
    """the first of which tunes"""
    data: Path = Path("data")
    """folder with tokenizer.json, tokens/ and source.json"""

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch: those of `train`."""
        return self.train.step_size(self.train.world_size).batch_size

    def plan_of(self, run: Run) -> RunPlan:
        """Return what a run trains. Its micro-batches are one batch of each rank, which is faster
        and equal up to rounding."""
        train, ranks = self.train, self.method.ranks(self.train)
        settings = train.model_copy(
            update={
                "world_size": ranks,
                "steps": run.steps,
                "batch_size": self.micro_batch * run.micro_batches // ranks,
                "global_batch_size": None,
                "accumulation": 1,
                "learning_rate": run.learning_rate,
                "warmup_steps": round(train.warmup_steps * run.steps / train.steps),
                "betas": run.betas,
                # what no loss depends on
                "untimed_steps": 0,
                "audit_steps": 0,
                "profiled_steps": 1,
                "link": None,
                "checkpoint": None,
                "validation": None,
            }
        )
        return RunPlan(self.name, run.seed, self.strategy, settings, self.model, self.data)

    def facts_of(self, run: Run) -> dict[str, Any]:
        """Return what the result of a run says that is settled before it, besides its name."""
        plan = self.plan_of(run)
        train = plan.train
        step = train.step_size(train.world_size)
        return {
            "key": key_of(plan),
            **run._asdict(),
            "strategy_hash": plan.strategy.hash(),
            "world_size": train.world_size,
            "model": plan.model.name,
            "sequence_length": train.sequence_length,
            "batch_size": step.batch_size,
            "tokens_per_step": step.samples * train.sequence_length * train.world_size,
        }


def key_of(plan: RunPlan) -> str:
    """Return 16 hexadecimal digits of a hash over all that the loss of a run depends on, but for
    the code of the library."""
    tokens, named = read_manifest(plan.data / "tokens"), plan.model.pretrained or plan.model.config
    # of a name on a hub nothing lies here
    content = Content.of(named) if named else None
    codecs = sorted(map(sha256_of_file, {*_files_of_users(plan.strategy.canonical())}))
    facts = (
        plan.strategy.hash(),
        {key: value for key, value in plan.train.meaning().items() if key in _MEANING},
        {key: value for key, value in plan.model.meaning().items() if value is not None},
        plan.seed,
        [shard.sha256 for shard in (*tokens.train, *tokens.validation)],
        *codecs,
        *([] if content is None else [content.sha256]),
    )
    return sha256_of_value(facts)[:16]


def _files_of_users(document: Document) -> Iterator[str]:
    """Yield the files of the codecs in a document that are none of the library's."""
    if isinstance(document, CodecSpec) and not type(document).__module__.startswith("shardlab."):
        yield inspect.getfile(type(document))
    for name in type(document).model_fields:
        if isinstance(inner := getattr(document, name), Document):
            yield from _files_of_users(inner)


def climb(
    sizes: Sequence[int],
    start: Sequence[int],
    tries: int,
    loss_at: Callable[[tuple[int, ...]], float],
) -> tuple[int, ...]:
    """Return the best of the points that were tried on a grid, each by an index on every axis.

    Neighbours of the best are tried until none is left, or so many points were tried. Of points
    with equal losses, as where all are infinite, the one with lower indices is better.

    Args:
        sizes: numbers of values of the axes.
    """
    losses: dict[tuple[int, ...], float] = {}
    untried = [tuple(start)]
    while untried and len(losses) < tries:
        losses[untried[0]] = loss_at(untried[0])
        best = min(losses, key=lambda point: (losses[point], point))
        near = [
            (*best[:axis], best[axis] + change, *best[axis + 1 :])
            for axis, size in enumerate(sizes)
            for change in (1, -1)
            if 0 <= best[axis] + change < size
        ]
        untried = [point for point in near if point not in losses]
    return best


def bracket(
    first: int,
    lengths: Sequence[int],
    loss: float,
    most: int,
    loss_at: Callable[[int], float],
) -> dict[int, float]:
    """Train lengths from the first one on, until the loss is between those of two; return their
    losses.

    Args:
        lengths: ascending numbers of steps.
        most: lengths that are trained at most besides the first.
    """
    losses = {first: loss_at(first)}
    is_longer = losses[first] > loss
    farther = [n for n in lengths if n > first] if is_longer else [n for n in lengths if n < first]
    for steps in (farther if is_longer else farther[::-1])[:most]:
        losses[steps] = loss_at(steps)
        if (losses[steps] > loss) != is_longer:
            break
    return losses


def search(tuning: Tuning, loss_of: Callable[[Run], float]) -> list[Run]:
    """Train what the search asks for, each run once; return the runs in their order.

    Args:
        loss_of: trains a run and returns its validation loss, infinite where it has none.
    """
    losses: dict[Run, float] = {}

    def loss_at(run: Run) -> float:
        if run not in losses:
            losses[run] = loss_of(run)
        return losses[run]

    for number in tuning.method.numbers(tuning.tune, tuning.train):
        _search(tuning, number, loss_at)
    return [*losses]


def _search(tuning: Tuning, number: int, loss_at: Callable[[Run], float]) -> None:
    tune, method, train = tuning.tune, tuning.method, tuning.train
    first, *later = tuning.seeds
    steps = tune.first_steps(number, train)
    rates, betas = tune.grid(train)
    rates = method.learning_rates or rates

    def tried(point: tuple[int, ...]) -> float:
        return loss_at(Run(number, steps, rates[point[0]], betas[point[1]], first))

    start = rates.index(method.first_rate(tune, train)), betas.index(train.betas)
    rate, beta = climb((len(rates), len(betas)), start, tune.tries, tried)
    best = Run(number, steps, rates[rate], betas[beta], first)

    def trained(steps: int) -> float:
        return loss_at(best._replace(steps=steps))

    lengths = _lengths(tune.equal_steps(number, train), tuning.strategy)
    most = tune.lengths if method.lengths is None else method.lengths
    losses = bracket(steps, lengths, tune.target_loss, most, trained)
    shorter, _ = lengths_around(tune.target_loss, losses) or (steps, steps)
    for seed in later:
        for length in sorted({shorter, steps}):
            loss_at(best._replace(steps=length, seed=seed))


def _lengths(equal: int, strategy: Strategy) -> list[int]:
    """Return numbers of steps, each about 1.4 times the one before, in which copies meet."""
    sync = strategy.sync
    least = 2 if sync is None else sync.every + sync.warmup_steps
    lengths = {round(equal * factor * 2.0**k) for k in range(-20, 21) for factor in (1, 1.4)}
    return sorted(steps for steps in lengths if steps >= least)


def measure(plan: RunPlan) -> dict[str, Any]:
    """Train and evaluate a run; return the header of its result, bytes and loss."""
    train = plan.train
    with temporary("shardlab-tune") as work:
        train_run(plan, work)
        # in a child process: this one stays free of threads, so that it can fork ranks
        worker = partial(_evaluate, plan, work)
        launch(worker, 1, train.threads, train.timeout_s, placement=train.placement)
        metrics, quality = (read_json(work / name) for name in ("metrics.json", "quality.json"))
    if metrics["diverged_at"] is not None:
        quality["val_loss"] = None
    names = [*Result.model_fields, "bytes_wire"]
    return {**{name: metrics[name] for name in names}, **quality}


def _evaluate(plan: RunPlan, work: Path, group: dist.ProcessGroup) -> None:
    split = open_split(plan.data / "tokens", "validation")
    model = load_model(work / "final_model")
    quality = evaluate(model, split, plan.train.sequence_length, BATCH)
    facts = {"val_loss": quality.loss, "val_tokens": quality.tokens}
    write_json(work / "quality.json", finite(facts))


def tune_method(
    tuning: Tuning,
    output: Path,
    work: Path,
    measure: Callable[[RunPlan], dict[str, Any]] = measure,
) -> None:
    """Search, and write the results of all runs to `output`, which `read_results` reads.

    Runs with the key of one that is there, or in `work`, are taken over.

    Args:
        work: folder with a file for each run, whose name is its key.
        measure: as the function of this name.

    Raises:
        RunFailed: a rank failed.
        UserError: a file of a run is damaged, or has the key of another run.
    """
    former = _read(output, work)
    results: dict[Run, TuneResult] = {}

    def loss_of(run: Run) -> float:
        facts, words = tuning.facts_of(run), _words(tuning, run, len(results) + 1)
        if former_result := former.get(facts["key"]):
            where, result = former_result
            _refuse_other(where, result, facts)
            end = f" (taken over from revision {result.revision})"
        else:
            say(f"{words}: trains")
            header = {**measure(tuning.plan_of(run)), **facts, "kind": "tune", "run": tuning.name}
            result, end = TuneResult(**header), ""
            result.to_file(work / f"{result.key}.json")
        results[run] = result.model_copy(update={"run": tuning.name})
        loss = result.val_loss
        say(f"{words}: {'no finite loss' if loss is None else f'loss {loss:.4f}'}{end}")
        return math.inf if loss is None else loss

    runs = search(tuning, loss_of)
    left = former.keys() - {result.key for result in results.values()}
    for key in left:
        former[key][1].to_file(work / f"{key}.json")
    write_results(output, [results[run] for run in runs])
    if left:
        say(
            f"tune {tuning.name}: {plural(len(left), 'run')} of other settings, model or text left "
            f"out, and kept in {work}"
        )
    say(f"tune {tuning.name}: {plural(len(runs), 'run')} in {output}")


def _read(output: Path, work: Path) -> dict[str, tuple[str, TuneResult]]:
    """Return the results of runs by their keys, with the place of each."""
    places = {}
    if output.is_file():
        lines = read_results(output, _FIX)
        places = {f"{output}:{number}": line for number, line in enumerate(lines, 1)}
    for path in sorted(work.glob("*.json")):
        places[str(path)] = parse_result(read_json(path, _FIX), str(path))
    results: dict[str, tuple[str, TuneResult]] = {}
    for where, result in places.items():
        if not isinstance(result, TuneResult):
            raise UserError(f"{where}: no run of a method: {_FIX}")
        if not re.fullmatch("[0-9a-f]{16}", result.key):
            raise UserError(f"{where}: {result.key!r} is no key of a run: {_FIX}")
        before, other = results.get(result.key, (where, result))
        if other.val_loss != result.val_loss:
            raise UserError(
                f"{where}: has val_loss {result.val_loss}, and {before}, of the same run, "
                f"{other.val_loss}: remove the wrong one"
            )
        results[result.key] = where, result
    return results


def _refuse_other(where: str, result: TuneResult, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if getattr(result, name) != value:
            raise UserError(
                f"{where}: has the key of a run with {name} {value}, and says "
                f"{getattr(result, name)}: {_FIX}"
            )


def _words(tuning: Tuning, run: Run, number: int) -> str:
    """Return a run in words, such as `tune stock: run 3: 100 steps of 2 micro-batches, ...`."""
    size = "1 micro-batch" if run.micro_batches == 1 else f"{run.micro_batches} micro-batches"
    betas = f", betas {run.betas[0]:g} and {run.betas[1]:g}" if tuning.tune.betas else ""
    return (
        f"tune {tuning.name}: run {number}: {run.steps} steps of {size}, "
        f"learning rate {run.learning_rate:g}{betas}, seed {run.seed}"
    )
