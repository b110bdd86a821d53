"""Manifest of a checkpoint, and the check whether a run may resume from it."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import damage, read_json, sha256_of_file, write_json
from shardlab.environment.host import git_revision
from shardlab.experiment.schema import Model, Train
from shardlab.loop.plan import RunPlan
from shardlab.strategy.strategy import CanonicalStrategy

_FILE = "checkpoint.json"
_AFTERWARDS = {"checkpoint", "timeout_s", "audit_steps", "profiled_steps"}
"""values of `train` that do not affect the steps of the run"""


class Manifest(Document):
    """Contents of checkpoint.json, which is written last."""

    format: Literal["full", "sharded"]
    step: int
    """number of steps done"""
    sample: int
    """index of the next sample"""
    strategy: CanonicalStrategy
    train: Train
    model: Model
    seed: int
    tokens: str
    """checksum of the manifest of the token shards"""
    revision: str
    torch: str
    files: dict[str, str]
    """SHA-256 of every file, by its path in the checkpoint"""

    @classmethod
    def of(cls, plan: RunPlan, format: Literal["full", "sharded"]) -> "Manifest":
        """Return the manifest of a run before its first step, without files."""
        return cls(
            format=format,
            step=0,
            sample=0,
            strategy=plan.strategy.canonical(),
            train=plan.train,
            model=plan.model,
            seed=plan.seed,
            tokens=sha256_of_file(plan.data / "tokens/manifest.json"),
            revision=git_revision(),
            torch=torch.__version__,
            files={},
        )

    def made_by(self) -> str:
        """Return the versions that wrote it; with others a run may not resume bit for bit."""
        return f"revision {self.revision} with torch {self.torch}"

    def write(self, folder: Path, files: dict[str, str]) -> None:
        """Write checkpoint.json, with the checksums of all other files."""
        write_json(folder / _FILE, {**self.model_dump(mode="json"), "files": files})

    def refuse_other(self, run: "Manifest", path: Path, elastic: bool) -> None:
        """Check that `run` can resume from this checkpoint, which is at `path`.

        Args:
            elastic: `train` and the strategy may differ.

        Raises:
            UserError: it cannot; says what differs.
        """
        there, here = self._meaning(), run._meaning()
        differ = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        fixed = [key for key in differ if key.partition(".")[0] not in ("train", "strategy")]
        if not (fixed if elastic else differ):
            return
        key = (fixed or differ)[0]
        fix = f"set it back, or remove {path.parent} to start anew"
        if not fixed:
            fix += ", or set train.checkpoint.elastic: true to go on all the same"
        raise UserError(
            f"{path}: made with {key} {json.dumps(there.get(key))}, now it is "
            f"{json.dumps(here.get(key))}: {fix}"
        )

    def verify(self, path: Path, share: slice = slice(None)) -> None:
        """Compare files with their checksums.

        Args:
            share: slice of the files, so that ranks can divide them.

        Raises:
            UserError: one is missing or damaged.
        """
        for name, what in damage(path, self.files, share):
            raise _damaged(path, name, what)

    def _meaning(self) -> dict[str, Any]:
        """Return the values that identify a run, by dotted keys."""
        plain = self.model_dump(mode="json", include={"model", "seed", "tokens", "strategy"})
        train = self.train.model_dump(mode="json", exclude=_AFTERWARDS)
        return _flat({**plain, "train": train})


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        UserError: it is missing or damaged.
    """
    if not (path / _FILE).is_file():
        raise _damaged(path, _FILE, "missing")
    try:
        return validate(Manifest, read_json(path / _FILE), _FILE)
    except ValueError as error:
        raise _damaged(path, _FILE, f"damaged ({error})") from None


def _damaged(path: Path, name: str, what: str) -> UserError:
    return UserError(f"{path / name}: {what}: remove {path} to continue from what was before it")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, each in value.items():
        flat |= _flat(each, f"{prefix}{key}.") if isinstance(each, dict) else {prefix + key: each}
    return flat
