#!/usr/bin/env python3
"""Compare results.jsonl of two runs of one experiment: what should repeat, did.

Bytes are equal everywhere. Losses are equal on the same processor, kernels for it and torch;
elsewhere they are within the standard deviation over the seeds. Prints what is otherwise, and ends
with 1.

    .ci/compare_results.py COMMITTED MADE
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Records = dict[tuple[str, int], dict[str, Any]]
BYTES = ("bytes_raw", "bytes_wire", "index_bytes", "metadata_bytes")
LOSSES = ("train_loss", "val_loss")


def read(path: str) -> Records:
    """Return the records by run and seed."""
    records = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return {(record["run"], record["seed"]): record for record in records}


def differences(committed: Records, made: Records) -> Iterator[str]:
    """Yield a line for each figure that does not repeat."""
    if not committed:
        yield "no record is committed"
    for run, seed in sorted(committed.keys() ^ made.keys()):
        yield f"{run}, seed {seed}: only {'made' if (run, seed) in made else 'committed'}"
    for run, seed in sorted(committed.keys() & made.keys()):
        old, new = committed[run, seed], made[run, seed]
        crashed = [record["crashed"] for record in (old, new) if "crashed" in record]
        if crashed:
            yield f"{run}, seed {seed}: crashed: {crashed[0]}"
            continue
        same = computed_by(old) == computed_by(new)
        for name in (*BYTES, *LOSSES):
            allowed = 0.0 if name in BYTES or same else spread(committed, run, name)
            if is_different(old[name], new[name], allowed):
                yield f"{run}, seed {seed}: {name} {new[name]}, committed {old[name]}"


def computed_by(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return processor, library of kernels with its instructions, and torch.

    Clouds give processors with and without AVX-512 one name.
    """
    kernels, _, _ = record["kernels"].partition(", csrc")
    return record["host"]["cpu"], kernels, record["torch"]


def spread(records: Records, run: str, name: str) -> float:
    """Return the standard deviation of a measure of a run over the seeds."""
    values = [record.get(name) for (of, _), record in records.items() if of == run]
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else 0.0


def is_different(old: float | None, new: float | None, allowed: float) -> bool:
    """Return whether two values are further apart than allowed; None is a run that diverged."""
    if old is None or new is None:
        return old is not new
    return abs(new - old) > allowed


if __name__ == "__main__":
    found = [*differences(*map(read, sys.argv[1:3]))]
    print("\n".join(found) or "bytes and losses repeat")
    sys.exit(bool(found))
