"""Training runs: each method is tuned, and trained until the loss to reach is between two lengths.

A run is kept in experiments/islands/runs when it ends, so that the command can be stopped and goes
on. It stays valid as long as its strategy, text, model and training settings are those of
params/islands.yaml, whatever else changes; it names the revision that made it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.islands.curves import length_at
from benchmarks.islands.methods import (
    FOLDER,
    LARGER,
    LARGER_STEPS,
    METHODS,
    TARGET,
    TARGET_LENGTHS,
    TARGET_STEPS,
    Method,
    parameters,
    steps_of_equal_tokens,
    strategies,
)
from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_value, temporary, write_json
from shardlab.core.host import describe_host, git_revision
from shardlab.core.progress import say
from shardlab.data.tokens import open_split, read_manifest
from shardlab.train.evaluation import evaluate, load_model
from shardlab.train.launch import launch
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Train

_RATES = (0.00133, 0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152)
"""learning rates; each method is tuned alike: from the middle of a few, with the first seed, until
the best is between two others"""
_FIRST_RATE = 0.003
_LENGTHS = (125, 175, 250, 350, 500, 700, 1000, 1400, 2000, 2800, 4000, 5600, 8000)
"""steps of runs: with the first seed, lengths are tried up or down until the loss to reach is
between those of two"""
_FARTHEST = 2
"""lengths, up or down, that are tried"""
_FIRST_SEED = 0
_MEANING = (
    *("world_size", "steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps"),
    *("decay", "weight_decay", "betas", "clip"),
)
"""settings of a run that its losses depend on"""


class Run(NamedTuple):
    """One training run."""

    method: str
    steps: int
    seed: int
    learning_rate: float
    folder: str = "runs"

    @property
    def path(self) -> Path:
        """File of its record."""
        name = f"{self.steps}-steps-seed{self.seed}-rate{self.learning_rate:g}.json"
        return FOLDER / self.folder / self.method / name


def train_of(params: Parameters, method: Method, steps: int, learning_rate: float) -> Train:
    """Return the settings of a run; micro-batches that are summed are one batch here, which is
    faster and equal up to rounding."""
    train: Train = params("train")
    return train.model_copy(
        update={
            "steps": steps,
            "learning_rate": learning_rate,
            "world_size": method.world_size,
            "batch_size": train.batch_size * method.accumulation,
            "accumulation": 1,
            "warmup_steps": round(train.warmup_steps * steps / train.steps),
        }
    )


def plan_of(params: Parameters, run: Run) -> RunPlan:
    """Return what a run trains."""
    method = METHODS[run.method]
    settings = train_of(params, method, run.steps, run.learning_rate)
    strategy = strategies()[method.strategy]
    return RunPlan(run.method, run.seed, strategy, settings, params("model"), FOLDER / "data")


def key_of(plan: RunPlan) -> str:
    """Return what tells a run from others of its name: all that its losses depend on."""
    tokens = read_manifest(plan.data / "tokens")
    facts = (
        plan.strategy.hash(),
        {key: value for key, value in plan.train.meaning().items() if key in _MEANING},
        plan.model.model_dump(mode="json", exclude_none=True),
        plan.seed,
        [shard.sha256 for shard in (*tokens.train, *tokens.validation)],
    )
    return sha256_of_value(facts)[:16]


def train(params: Parameters, run: Run) -> float:
    """Train and evaluate one run, unless its record is there; return its validation loss."""
    plan = plan_of(params, run)
    settings, key = plan.train, key_of(plan)
    if run.path.is_file():
        record = read_json(run.path, "remove it")
        if record["key"] == key:
            return float(record["val_loss"])
    say(f"{run.path}: trains")
    with temporary("shardlab-islands") as work:
        train_run(plan, work)
        # a diverged run has a model, too; a child process leaves this one free to fork ranks
        launch(partial(_evaluate, work, plan), 1, threads=2, timeout_s=settings.timeout_s)
        metrics, quality = (read_json(work / name, "") for name in ("metrics.json", "v.json"))
    record = {
        "key": key,
        **run._asdict(),
        "strategy": plan.strategy.label(),
        "strategy_hash": plan.strategy.hash(),
        "world_size": settings.world_size,
        "tokens_per_step": settings.batch_size * settings.sequence_length * settings.world_size,
        "parameters": metrics["parameters"],
        "bytes_wire": metrics["bytes_wire"],
        **quality,
        "revision": git_revision(),
        "host": describe_host()["cpu"],
    }
    write_json(run.path, record)
    return float(record["val_loss"])


def _evaluate(work: Path, plan: RunPlan, group: dist.ProcessGroup) -> None:
    split = open_split(plan.data / "tokens", "validation")
    model = load_model(work / "final_model")
    quality = evaluate(model, split, plan.train.sequence_length, batch=32)
    write_json(work / "v.json", {"val_loss": quality.loss, "val_tokens": quality.tokens})


def tuned_rate(name: str, loss_at: Callable[[float], float]) -> float:
    """Return the learning rate with the lowest loss, of which both neighbours are worse.

    Raises:
        UserError: it is the lowest or the highest of the grid.
    """
    best = _RATES.index(_FIRST_RATE)
    while True:
        if not 0 < best < len(_RATES) - 1:
            raise UserError(f"{name}: {_RATES[best]:g} is the end of the learning rates")
        near = min((best, best - 1, best + 1), key=lambda index: loss_at(_RATES[index]))
        if near == best:
            return _RATES[best]
        best = near


def lengths_around(first: int, loss: float, loss_at: Callable[[int], float]) -> dict[int, float]:
    """Train lengths from the first one on until the loss is between those of two; return the
    losses."""
    found = {first: loss_at(first)}
    longer = found[first] > loss
    others = (
        [n for n in _LENGTHS if n > first] if longer else [n for n in _LENGTHS if n < first][::-1]
    )
    for steps in others[:_FARTHEST]:
        found[steps] = loss_at(steps)
        if (found[steps] > loss) != longer:
            break
    return found


def rate_of(params: Parameters, name: str) -> float:
    """Return the learning rate of a method, whose tuning runs are trained unless they are there."""
    own = METHODS[name].tuned_as or name
    steps = METHODS[own].steps
    return tuned_rate(own, lambda rate: train(params, Run(own, steps, _FIRST_SEED, rate)))


def train_all(params: Parameters, names: Sequence[str], seeds: int) -> None:
    """Tune methods and try their lengths with the first seed; then train with each seed the shorter
    of the lengths around the loss, and that which sees as many tokens as the target."""
    names = [name for name in names if METHODS[name].same_as is None]
    target = Run(TARGET, TARGET_STEPS, _FIRST_SEED, rate_of(params, TARGET))
    lengths = {}
    for name in names:
        rate = rate_of(params, name)

        def loss_at(steps: int, name: str = name, rate: float = rate) -> float:
            return train(params, Run(name, steps, _FIRST_SEED, rate))

        loss = train(params, target)
        around = length_at(loss, lengths_around(METHODS[name].steps, loss, loss_at))
        lengths[name] = around.shorter if around and name != TARGET else METHODS[name].steps
        for steps in TARGET_LENGTHS if name == TARGET else ():
            loss_at(steps)
    for seed in range(seeds):
        for name in names:
            for steps in sorted({lengths[name], steps_of_equal_tokens(name, TARGET_STEPS)}):
                train(params, Run(name, steps, seed, rate_of(params, name)))


def train_larger(names: Sequence[str]) -> None:
    """Train methods with the larger model, once: learning rates are halved, as its width is twice
    that of the model that they were tuned with."""
    for name in names:
        if name in LARGER:
            steps = steps_of_equal_tokens(name, LARGER_STEPS)
            rate = rate_of(parameters(), name) / 2
            train(parameters(larger=True), Run(name, steps, _FIRST_SEED, rate, "larger"))
