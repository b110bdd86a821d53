"""Proof and figures of a GPU, in parts with time limits.

    python -m benchmarks.gpu correct|measure|PART ... [--seconds S] [--limit S] [--skip PART ...]
                             [--device cuda|cpu] [--at-once N] [--out FOLDER]

Each part is a process, and its line comes when it ends: PASS, FAIL, LATE (killed at its limit) or
SKIP (no time was left). `correct` are tests of `tests/gpu`, several at a time; `measure` are
figures, one at a time. A word that is neither is a part, or the beginning of names of parts. Parts
need torch, the packages of shardlab and pytest, no installation and no network.

The folder gets `correct.json` or `measure.json` (`parts.json` of single parts), with what each part
said; `correct-failures.txt` and so on, with the output of those that did not pass; and of figures
the rows `figures.jsonl`, the page `gpu.md` and traces. The exit code is 1 if a part failed or was
late.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import arguments
from benchmarks.gpu import figures
from benchmarks.gpu.parts import Part, correct_parts, measure_parts
from benchmarks.gpu.running import PartOutcome, run_parts
from shardlab.core.errors import UserError
from shardlab.core.progress import say

_LONGEST_OUTPUT = 8000
_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""folders by variable, so that parts share what one of them has compiled"""


def main() -> int:
    cores, nothing = len(os.sched_getaffinity(0)), list[str]()
    args = arguments(
        __doc__,
        ("parts", "correct, measure, names of parts or their beginnings"),
        seconds=(300.0, "for all parts"),
        limit=(0.0, "of each part, in seconds, instead of its own"),
        skip=(nothing, "names of parts or their beginnings"),
        device=(os.environ.get("DEVICE", "cuda"), "cuda, or cpu for a dry run"),
        at_once=(max(1, min(10, cores - 4)), "how many of `correct` run beside each other"),
        out=figures.OUT,
    )
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.device != "cuda" or not figures.on_gpu():
        raise UserError(f"--device {args.device}: there is none here; --device cpu is a dry run")
    modes = {"correct": correct_parts(args.device), "measure": measure_parts(str(args.out))}
    parts = chosen(modes, args.parts, args.skip, args.device)
    if args.limit:
        parts = [part._replace(limit_s=args.limit) for part in parts]
    for variable, folder in _COMPILED.items():
        os.environ.setdefault(variable, str(Path(".work/compiled", folder).absolute()))
    args.out.mkdir(parents=True, exist_ok=True)
    if "measure" in args.parts:
        figures.forget(args.out)
    mode = args.parts[0] if args.parts[0] in modes else "parts"
    ended: list[PartOutcome] = []

    def show(outcome: PartOutcome) -> None:
        ended.append(outcome)
        write(args.out, mode, ended)
        line = f"{outcome.verdict} {outcome.name} {outcome.seconds:.0f} s: {outcome.text}"
        print(line, flush=True)

    outcomes = run_parts(parts, args.seconds, args.at_once, show)
    write(args.out, mode, outcomes)
    if any(part.alone for part in parts):
        figures.write_page(args.out)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(f"{args.device}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    for verdict in ("FAIL", "LATE", "SKIP"):
        if names := [outcome.name for outcome in outcomes if outcome.verdict == verdict]:
            print(f"{verdict}: {' '.join(names)}")
    return 1 if counts["FAIL"] or counts["LATE"] else 0


def chosen(
    modes: dict[str, list[Part]], words: Sequence[str], skipped: Sequence[str], device: str
) -> list[Part]:
    """Return the parts of modes, names and beginnings of names, without those that are skipped.

    A CPU has none of the parts that are for a GPU alone.

    Raises:
        UserError: a word means no part.
    """
    parts = [part for mode in modes.values() for part in mode]
    parts = [part for part in parts if device == "cuda" or not part.only_on_gpu]
    names: list[str] = []
    for word in words:
        exact = [part.name for part in parts if word == part.name or part in modes.get(word, [])]
        some = exact or [part.name for part in parts if part.name.startswith(word)]
        if not some:
            known = ", ".join([*modes, *(part.name for part in parts)])
            raise UserError(f"{word!r}: no part; there are {known}")
        names += some
    if not names:
        raise UserError("which parts? correct, measure, or names: see --help")
    left = [part for part in parts if part.name in names]
    return [part for part in left if not part.name.startswith(tuple(skipped))]


def write(folder: Path, mode: str, outcomes: Sequence[PartOutcome]) -> None:
    """Write what parts have said so far, and the output of those that did not pass."""
    rows = [outcome._replace(output="")._asdict() for outcome in outcomes]
    (folder / f"{mode}.json").write_text(json.dumps(rows, indent=1) + "\n")
    failures = [
        f"==== {outcome.verdict} {outcome.name}\n{outcome.output[-_LONGEST_OUTPUT:]}\n"
        for outcome in outcomes
        if outcome.verdict in ("FAIL", "LATE")
    ]
    (folder / f"{mode}-failures.txt").write_text("".join(failures))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        say(f"benchmarks.gpu: {error}")
        sys.exit(2)
