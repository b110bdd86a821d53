"""Record digests of the code that each stage imports, and of what machine a stage measures:
data/code/STAGE.json.

Both tools compare these digests and not the hundreds of files themselves, which DVC would look at
again for every stage and list in dvc.lock, and Snakemake for every job that becomes ready.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.config.timing_record import machine_name
from shardlab.core.files import files_below, sha256_of_file, write_text
from shardlab.core.host import describe_host, torch_version
from stages.common import run

_FOLDER = Path("data/code")


_EVERY = ("csrc", "shardlab", "stages", "user_codecs")

STAGES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "plans",
        "content",
        "inputs",
        "prepare",
        "tokenize",
        "train",
        "profile",
        "validate",
        "timing",
        "calibrate",
        "forecast",
        "estimate",
        "collect",
        "propose",
        "trial",
        "decide",
        "report",
        "readme",
    ),
    (),
)
"""files and folders of code that each stage imports, besides those of every stage and its own"""


_MEASURING = ("timing", "calibrate", "trial")
"""stages that measure time: another processor, GPU or build of torch repeats them"""


def paths(stage: str) -> list[str]:
    """Return all files and folders of code that a stage depends on."""
    return sorted({*_EVERY, f"stages/{stage}.py", *STAGES[stage]})


def digests(stage: str) -> dict[str, str]:
    """Return a digest of each file and folder of code that a stage depends on, and the name of this
    machine for those that measure it."""
    found = {path: _digest(path) for path in paths(stage)}
    return {**found, "machine": _machine()} if stage in _MEASURING else found


@cache
def _machine() -> str:
    return machine_name(describe_host(), torch_version())


@cache
def _digest(path: str) -> str:
    """Hash a file, or a folder less the by-products that .dvcignore names."""
    found = hashlib.sha256()
    for name, file in sorted(files_below(Path(path)).items()):
        if not _is_by_product(name):
            found.update(f"{file} {sha256_of_file(file)}\n".encode())
    return found.hexdigest()[:16]


def _is_by_product(name: str) -> bool:
    """Return whether an editor, Python or the compiler wrote a file of this relative path."""
    parts = Path(name).parts
    hidden = any(part.startswith(".") for part in parts)
    return hidden or "__pycache__" in parts or name.endswith((".so", "~"))


def main(params: Parameters) -> None:
    """Write data/code/STAGE.json."""
    for stage in STAGES:
        write_text(_FOLDER / f"{stage}.json", json.dumps(digests(stage), indent=1) + "\n")


if __name__ == "__main__":
    run(main)
