"""Two commands start in one tree: one works, the other says who does, and nothing is damaged.

`python -m tests.faults.locks [N]` starts every pair of Snakemake, DVC and a single stage N times,
the second up to two seconds after the first, and prints a table.
"""

import itertools
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardlab.core.files import read_json, sha256_of_file
from tests.pipeline.workspace import copy_project, speaking, wait_for

COMMANDS = {
    "snakemake": ["snakemake", "--cores", "1", "data/source.json"],
    "dvc": ["dvc", "repro", "prepare"],
    "stage": ["python", "-m", "stages.prepare"],
}
PAIRS = list(itertools.product(COMMANDS, repeat=2))


def make_slow(root: Path) -> Path:
    """A project whose first stage does not end before there is a file `go`."""
    copy_project(root)
    stage = root / "stages/prepare.py"
    wait = "    import time\n    Path('at-work').touch()\n    while not Path('go').exists():\n"
    wait += "        time.sleep(0.01)\n"
    stage.write_text(
        stage.read_text().replace("    source = prepare(", f"{wait}    source = prepare(", 1)
    )
    return root


@contextmanager
def started(root: Path, name: str, warm: bool = False) -> Iterator[subprocess.Popen[str]]:
    """One of the commands in the background; what it says is one text."""
    process = subprocess.Popen(COMMANDS[name], **speaking(root, warm))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def compete(root: Path, first: str, second: str, delay: float | None) -> str:
    """Start both and return the name of the one that did the work.

    Args:
        delay: seconds between the starts; None: the second starts when the first is at work.
    """
    with started(root, first) as one:
        if delay is None:
            wait_for((root / "at-work").exists, 120, first)
        else:
            time.sleep(delay)
        # who finds another at work names that one, whose process is real
        with started(root, second, warm=delay is None) as other:
            wait_for(
                lambda: None not in (one.poll(), other.poll()) or one.poll() != other.poll(),
                240,
                "a loser",
            )
            winner, loser = (other, one) if one.poll() is not None else (one, other)
            name, lost = (second, first) if winner is other else (first, second)
            said = loser.communicate()[0]
            assert loser.returncode in ((255,) if lost == "dvc" else (2,)), said
            assert_named(said, winner.pid, name, lost)
            (root / "go").touch()
            rest = winner.communicate(timeout=240)[0]
            assert winner.returncode == 0, rest
    assert not list(root.glob("data/.*")), "leftovers"
    read_json(root / "data/corpus.json")
    return name


def assert_named(said: str, pid: int, winner: str, loser: str) -> None:
    """The loser's last words name the process that works; DVC says it in words of its own."""
    if loser == "dvc" and winner == "dvc" and "Unable to acquire lock" in said:
        return
    pattern = (
        rf"\(PID {pid}\)" if loser == "dvc" and "busy" in said else rf"\(pid {pid}\) works here"
    )
    found = [line for line in said.splitlines() if re.search(pattern, line)]
    assert found if loser == "dvc" else len(found) == 1, said
    assert winner in found[0] or (winner == "stage" and "stages.prepare" in found[0]), said


def main(times: int) -> None:
    """Print how often each of a pair won; ends with an error where both or none did."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        pristine, corpora = make_slow(Path(folder, "pristine")), set()
        for first, second in PAIRS:
            wins = {first: 0, second: 0}
            for _ in range(times):
                root = Path(shutil.copytree(pristine, Path(folder, "tree")))
                wins[compete(root, first, second, rng.uniform(0, 2))] += 1
                corpora.add(sha256_of_file(root / "data/corpus.json"))
                shutil.rmtree(root)
            print(f"{first:>9} then {second:<9}: {wins}", flush=True)
        assert len(corpora) == 1, "damaged output"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
