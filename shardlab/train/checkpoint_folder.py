"""Folder with the checkpoints of one run, each complete on disk or absent, and without pickles.

step-00000040/
  checkpoint.json              parameters, and the checksum of every other file
  model.safetensors            format full: parameters by the names of the unwrapped model
  optimizer.safetensors        and what the optimizer keeps of each of them
  sharded/*.safetensors        format sharded: torch.distributed.checkpoint, one file per rank
  rank-00000.safetensors       of each rank: residuals, counters, random states
  rank-00000.json              and its events and ledger
"""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from shardlab.core.document import Document, flat
from shardlab.core.errors import UserError
from shardlab.core.files import find_damage, sha256_of_file, writing
from shardlab.models.settings import Model
from shardlab.strategy.document import CanonicalStrategy
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train

_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    """Folder of `root/step-00000040` and so on, named by the number of steps done.

    A checkpoint is written under a hidden name and renamed; it is renamed back before it is
    removed. So a process that is killed leaves no incomplete checkpoint under a visible name. One
    process at a time makes changes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, step: int) -> Path:
        """Return the path of the complete checkpoint of a step."""
        return self._root / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Return the path of a checkpoint that is being written."""
        return self._root / f".step-{step:08d}.partial"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in ascending order."""
        paths = self._root.iterdir() if self._root.is_dir() else ()
        return sorted(int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name)))

    def begin(self, step: int) -> None:
        """Create `unfinished(step)`, empty; remove what killed processes have left unfinished."""
        for path in self._root.glob(".step-*.partial"):
            shutil.rmtree(path)
        self.unfinished(step).mkdir(parents=True)

    def commit(self, step: int, keep: int) -> None:
        """Make `unfinished(step)` the checkpoint; remove all but the last `keep`."""
        if self.path(step).exists():  # damaged: the run went on from the one before
            shutil.rmtree(self.path(step))
        self.unfinished(step).rename(self.path(step))
        for old in self.steps()[:-keep]:
            self._remove(old)

    def keep(self, target: Path) -> None:
        """Move all checkpoints into another folder of the same file system, in place of those of
        the same steps.

        Raises:
            StorageError: they cannot be moved.
        """
        kept = Folder(target)
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
            for step in self.steps():
                if kept.path(step).exists():
                    kept._remove(step)
                self.path(step).rename(kept.path(step))

    def remove(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it.

        Raises:
            StorageError: they cannot be removed.
        """
        with writing(self._root):
            for step in self.steps():
                self._remove(step)
            for path in self._root.glob(".step-*.partial"):
                shutil.rmtree(path)
        with suppress(OSError):
            self._root.rmdir()

    def _remove(self, step: int) -> None:
        shutil.rmtree(self.unfinished(step), ignore_errors=True)  # of a killed process
        self.path(step).rename(self.unfinished(step))
        shutil.rmtree(self.unfinished(step))


_FILE = "checkpoint.json"
_AFTERWARDS = {"checkpoint", "timeout_s", "audit_steps", "profiled_steps"}
"""values of `train` that do not affect the steps of the run"""


class CheckpointManifest(Document):
    """Contents of checkpoint.json, which is written last."""

    format: Literal["full", "sharded"]
    step: int
    """number of steps done"""
    sample: int
    """index of the next sample"""
    strategy: CanonicalStrategy
    train: Train
    model: Model
    model_files: str | None = None
    """of `Model.state`"""
    seed: int
    tokens: str
    """checksum of the manifest of the token shards"""
    files: dict[str, str]
    """SHA-256 of every file, by its path in the checkpoint"""

    @classmethod
    def of(cls, plan: RunPlan, format: Literal["full", "sharded"]) -> "CheckpointManifest":
        """Return the manifest of a run before its first step, without files."""
        return cls(
            format=format,
            step=0,
            sample=0,
            strategy=plan.strategy.canonical(),
            train=plan.train,
            model=plan.model,
            model_files=plan.model.state(),
            seed=plan.seed,
            tokens=sha256_of_file(plan.data / "tokens/manifest.json"),
            files={},
        )

    @classmethod
    def read(cls, path: Path) -> "CheckpointManifest":
        """Read the manifest of the checkpoint at `path`.

        Raises:
            UserError: it is missing or damaged.
        """
        return cls.from_file(path / _FILE, f"remove {path}")

    def write(self, folder: Path) -> None:
        """Write checkpoint.json."""
        self.to_file(folder / _FILE)

    def refuse_other(
        self, run: "CheckpointManifest", path: Path, elastic: bool, named: bool = False
    ) -> None:
        """Check that `run` can resume from this checkpoint, which is at `path`.

        Args:
            elastic: `train` and the strategy may differ.
            named: the user named this one.

        Raises:
            UserError: it cannot; says what differs.
        """
        saved, wanted = self.meaning(), run.meaning()
        if "constant" in (self.train.decay, run.train.decay):  # a run may go on for longer
            saved["train.steps"] = wanted["train.steps"]
        differ = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
        anew = "name another" if named else f"remove {path.parent} to start anew"
        # moments of one optimizer are none of another
        fixed = [
            key
            for key in differ
            if key == "train.optimizer" or key.partition(".")[0] not in ("train", "strategy")
        ]
        if not (fixed if elastic else differ):
            if self.step > run.train.steps:
                raise UserError(
                    f"{path}: {self.step} steps are done, train.steps is {run.train.steps}: set it "
                    f"to {self.step} or more, or {anew}"
                )
            return
        key = (fixed or differ)[0]
        fix = f"set it back, or {anew}"
        if not fixed:
            fix += ", or set train.checkpoint.elastic: true to go on all the same"
        raise UserError(
            f"{path}: made with {key} {json.dumps(saved.get(key))}, now it is "
            f"{json.dumps(wanted.get(key))}: {fix}"
        )

    def meaning(self) -> dict[str, Any]:
        """Return the values that identify a run, by dotted keys."""
        named = {"model", "model_files", "seed", "tokens", "strategy"}
        plain = self.model_dump(mode="json", include=named)
        train = self.train.model_dump(mode="json", exclude=_AFTERWARDS)
        return flat({**plain, "train": train})


def damage_in(path: Path, share: slice = slice(None)) -> str | None:
    """Return the first file of the checkpoint at `path` that is missing or damaged, and which.

    Args:
        share: of the files, so that ranks can divide them.
    """
    try:
        damage = find_damage(path, CheckpointManifest.read(path).files, share)
    except UserError as error:
        return str(error).removesuffix(f": remove {path}")
    return None if damage is None else f"{path / damage[0]}: {damage[1]}"
