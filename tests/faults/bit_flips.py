"""Damage to every kind of file that a stage leaves, each read by its real reader.

    python -m tests.faults.bit_flips [FAULTS [SEED]]

runs a tiny pipeline in a temporary folder and damages its files FAULTS times (1,000 when not
given): one bit flipped, the end cut off, or a page zeroed. Prints how many faults of each kind were
named (one line with the file's name), read in silence, or ended with a traceback; exits with an
error unless all were named.
"""

import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Trial
from shardlab.checkpoint.folder import damage_in
from shardlab.collection.join import Metrics
from shardlab.collection.stage_files import read_document, read_estimate, read_loss_curve
from shardlab.core.checksums import refuse_damage, refuse_damage_of, write_checked
from shardlab.core.errors import UserError
from shardlab.data.tokens.tokens import open_split
from shardlab.evaluation.validate import FILES, load_model
from shardlab.experiment.schema import Timing
from shardlab.launch import launch
from shardlab.records.run import Breakdown, Validation, read_records, write_records
from shardlab.records.timing import NO_COMMUNICATION, read_timing, write_timings
from stages import profile
from tests.checkpoint.checkpointed import Run, plan_of, strategy_of
from tests.measured_run import measure
from tests.record_factory import make_history, make_records
from tests.timed_run_factory import make_timed
from tests.token_data import make_token_data

_PAGE = 4096
_RUN = Path("results/train/a-run/seed1")
_TIMED = ("ddp", NO_COMMUNICATION)


class Kind(NamedTuple):
    """Files that one reader reads."""

    files: Sequence[Path]
    read: Callable[[], object]


def run_pipeline() -> dict[str, Kind]:
    """Leave in the working directory what the stages leave; return it by kind."""
    data, results = Path("data"), Path("results")
    plan = plan_of(make_token_data(data), strategy_of("fsdp2", codec="int8", error_feedback=True))
    record = measure(plan, _RUN)
    profile.main(None, "a-run", "1")  # type: ignore[arg-type]
    (_RUN / "validation.json").rename(results / "validation.json")
    write_records(results / "results.jsonl", [record, record])
    write_timings(results / "slow.jsonl", [make_timed("slow", run) for run in _TIMED])
    write_checked(results / "memory.json", {"ddp": {"traced": None, "closed_form": {"all": 8}}})
    make_history(make_records()).to_file(results / "history.json")
    Trial(round=1).to_file(results / "trial.json")

    def save(group: dist.ProcessGroup) -> None:
        for form in ("full", "sharded"):
            Run.start(plan, Path("checkpoints", form), group, every=1, format=form).to(1)

    launch(save, plan.train.world_size, 1, 60)
    timing = Timing(world_size=2, runs=("ddp",), repetitions=1)
    tokens = [*(data / "tokens").iterdir()]
    return {
        "corpus": Kind([data / "corpus.json", data / "source.json"], _read_corpus),
        "tokens": Kind(tokens, _read_tokens),
        "tokenizer": Kind([data / "tokenizer.json"], _read_tokenizer),
        "metrics": _record(_RUN / "metrics.json", lambda path: read_document(Metrics, path, "x")),
        "events": _record(_RUN / "events.jsonl", lambda _: read_loss_curve(results, "a-run", 1)),
        "trace": Kind([_RUN / "trace.json.gz"], lambda: profile.main(None, "a-run", "1")),  # type: ignore[arg-type]
        "final_model": Kind([*(_RUN / "final_model").iterdir()], _read_model),
        "checkpoint, full": _checkpoint("full"),
        "checkpoint, sharded": _checkpoint("sharded"),
        "profile": _record(
            results / "profile/a-run/seed1.json", lambda path: read_document(Breakdown, path, "x")
        ),
        "validation": _record(
            results / "validation.json", lambda path: read_document(Validation, path, "x")
        ),
        "results": _record(results / "results.jsonl", read_records),
        "timings": _record(
            results / "slow.jsonl", lambda path: read_timing(path.parent, "slow", timing)
        ),
        "memory": _record(results / "memory.json", lambda path: read_estimate(path, "ddp")),
        "history": _record(results / "history.json", lambda path: History.from_file(path, "x")),
        "trial": _record(results / "trial.json", lambda path: Trial.from_file(path, "x")),
    }


def _record(path: Path, read: Callable[[Path], object]) -> Kind:
    return Kind([path], lambda: read(path))


def _checkpoint(form: str) -> Kind:
    folder = Path("checkpoints", form, "step-00000001")

    def read() -> None:
        found = damage_in(folder)
        if found is not None:
            raise UserError(found)

    return Kind([path for path in folder.rglob("*") if path.is_file()], read)


def _read_corpus() -> None:
    refuse_damage_of(["corpus.json"], Path("data/source.json"), "x")


def _read_tokens() -> None:
    for split in ("train", "validation"):
        open_split("data/tokens", split)


def _read_tokenizer() -> None:
    expected = {"tokenizer.json": open_split("data/tokens", "train").tokenizer_sha256}
    refuse_damage(Path("data"), expected, "x")


def _read_model() -> None:
    refuse_damage_of([f"final_model/{name}" for name in FILES], _RUN / "metrics.json", "x")
    load_model(_RUN / "final_model")


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return other bytes: with a bit flipped, cut off, or with a page of zeros."""
    new = bytearray(content)
    how, place = chance.random(), chance.randrange(len(content))
    if how < 0.7:
        new[place] ^= 1 << chance.randrange(8)
    elif how < 0.85:
        del new[place:]
    else:
        page = slice(place // _PAGE * _PAGE, (place // _PAGE + 1) * _PAGE)
        new[page] = bytes(len(new[page]))
    return damaged(content, chance) if new == content else bytes(new)


def outcome(kind: Kind, path: Path) -> str:
    """Read the kind, of which a file is damaged; return what the reader made of it."""
    try:
        kind.read()
    except UserError as error:
        message = str(error)
        return "named" if path.name in message and "\n" not in message else "traceback"
    except Exception as error:  # whatever a reader may raise
        print(f"{path}: {error!r}")
        return "traceback"
    print(f"{path}: silent")
    return "silent"


def try_faults(kinds: dict[str, Kind], faults: int, seed: int) -> dict[str, Counter[str]]:
    """Damage a file of each kind in turn; return the outcomes by kind."""
    chance, found = random.Random(seed), {name: Counter[str]() for name in kinds}
    for number in range(faults):
        name = [*kinds][number % len(kinds)]
        path = chance.choice(sorted(kinds[name].files))
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, chance))
        found[name][outcome(kinds[name], path)] += 1
        path.write_bytes(whole)
    return found


def main(faults: int = 1000, seed: int = 0) -> bool:
    """Print the table; return whether all faults were named."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            kinds = run_pipeline()
            for kind in kinds.values():
                kind.read()  # as long as nothing is damaged, nothing is refused
            found = try_faults(kinds, faults, seed)
        finally:
            os.chdir(home)
    columns = ("named", "silent", "traceback")
    print(f"{'kind':20} {'faults':>9}" + "".join(f"{column:>10}" for column in columns))
    for name, counts in {**found, "all": sum(found.values(), Counter[str]())}.items():
        print(f"{name:20} {counts.total():9}" + "".join(f"{counts[c]:10}" for c in columns))
    return all(set(counts) <= {"named"} for counts in found.values())


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
