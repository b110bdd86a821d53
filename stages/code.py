"""Record digests of the code that each stage imports, and of what machine a stage measures:
data/code/STAGE.json.

Both tools compare these digests and not the hundreds of files themselves, which DVC would look at
again for every stage and list in dvc.lock, and Snakemake for every job that becomes ready.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from shardlab.core.files import files_below, sha256_of_file, write_text
from shardlab.environment.host import describe_host, torch_version
from shardlab.experiment.parameters import Parameters
from shardlab.records.timing import machine_name
from stages.common import run

_FOLDER = Path("data/code")


def _library(*packages: str) -> tuple[str, ...]:
    return tuple(f"shardlab/{package}" for package in packages)


_EVERY = (
    *_library("__init__.py", "core", "experiment", "strategy"),
    *("stages/__init__.py", "stages/common.py", "stages/forks.py"),
)
_PLANS = ("stages/outside.py", "stages/plans.py")
_CODECS = (
    *_library("activations", "codecs", "devices", "kernels", "records", "transport"),
    *("csrc", "user_codecs"),
)
_MODELS = _library("buffers", "comm", "data/tokens", "memory", "models", "units")
_RANKS = _library("emulation", "environment", "hardware", "launch")
_STEPS = (*_CODECS, *_MODELS, *_RANKS, *_library("engines", "loop"))
_RUNS = _library("checkpoint", "evaluation", "train")
_FORECAST = _library("buffers", "forecast", "measurements", "records")
_RACES = _library("agent/decisions", "agent/races", "agent/records")
_PROPOSALS = (
    *_FORECAST,
    *_library("agent/proposals", "agent/records", "agent/space", "memory", "models", "units"),
)

STAGES: dict[str, tuple[str, ...]] = {
    "plans": _PLANS,
    "content": _PLANS,
    "inputs": _PLANS,
    "prepare": (*_PLANS, *_library("data/corpus", "data/sources")),
    "tokenize": (*_PLANS, *_library("data/corpus", "data/tokenize", "data/tokens")),
    "train": (*_PLANS, *_STEPS, *_RUNS, *_library("profiling/capture", "profiling/traces")),
    "profile": _library("profiling/analysis", "profiling/traces", "records"),
    "validate": (
        *_PLANS,
        *_library("data/tokens", "evaluation", "hardware", "launch", "models", "records"),
    ),
    "timing": (*_PLANS, *_STEPS, *_library("profiling", "timing")),
    "calibrate": (
        *(*_PLANS, *_CODECS, *_RANKS),
        *_library("calibration", "measurements", "profiling/traces"),
    ),
    "forecast": (*_PLANS, *_FORECAST, *_library("collection")),
    "estimate": (
        *(*_PLANS, *_CODECS, *_MODELS),
        *_library("engines/common", "engines/wrapped", "estimation", "profiling/traces"),
    ),
    "collect": (*_PLANS, *_library("collection", "records")),
    "propose": (*_PLANS, *_PROPOSALS),
    "trial": (
        *(*_PLANS, *_STEPS, *_RUNS, *_RACES),
        *_library("agent/trials", "profiling", "timing"),
    ),
    "decide": (*_PLANS, *_RACES, *_library("records")),
    "policies": (*_PLANS, *_PROPOSALS, *_library("agent/policies", "agent/replays")),
    "report": (
        *(*_PLANS, *_FORECAST),
        *_library("agent/records", "agent/replays", "collection", "report"),
    ),
    "readme": ("stages/summary.py",),
}
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
