"""Periodic checkpoints of a run, and resumption from the last.

Format `full` holds whole tensors by the names of the unwrapped model, for any engine. In `sharded`
every rank writes its part, and any number of ranks reads what it needs, by
torch.distributed.checkpoint with its safetensors storage: FileSystemWriter pickles its metadata.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlab.comm.background import Background
from shardlab.comm.handle import merge_states
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_files, writing
from shardlab.core.progress import say
from shardlab.engines.base import Engine, EngineState
from shardlab.engines.state_files import (
    in_host_memory,
    load_state,
    random_state,
    save_state,
    save_tensors,
    set_random_state,
)
from shardlab.train.checkpoint_folder import CheckpointManifest, Folder, damage_in
from shardlab.train.loop import Loop, StepEvent
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Checkpoint
from shardlab.train.summary import mean_ledger, merge_events

_MODEL, _OPTIMIZER, _SHARDED = "model.safetensors", "optimizer.safetensors", "sharded"


class Checkpoints:
    """Checkpoints of one run. All ranks call the same methods in the same order.

    Laws:
    - a run that resumes with the same plan ends bit for bit as if it had not been interrupted;
    - a process that is killed at any time leaves the last checkpoint whole for the next start.

    Args:
        root: a folder that all ranks share.
        group: of the ranks that train.
        named: a checkpoint to begin from, where there is none in `root`.
    """

    def __init__(
        self,
        plan: RunPlan,
        options: Checkpoint,
        root: Path,
        engine: Engine,
        loop: Loop,
        group: dist.ProcessGroup,
        named: Path | None = None,
    ) -> None:
        self._plan = plan
        self._named = named
        self._options = options
        self._folder = Folder(root)
        self._engine = engine
        self._loop = loop
        # a separate group: training communicates concurrently, and torch's default timeout lets a
        # slow disk take longer than a rank may wait in a step
        self._group = dist.new_group(dist.get_process_group_ranks(group))
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._is_chief = self._rank == 0
        self._share = slice(self._rank, None, self._world_size)
        """of the files whose checksums this rank computes"""
        self._background = Background("checkpoint")

    def resume(self) -> list[StepEvent]:
        """Resume from the last whole checkpoint, or else from the named one; return the events of
        the steps that are done.

        Raises:
            UserError: all checkpoints are damaged, or it is of another experiment.
        """
        step = self._last_whole()
        path = self._whole_named() if step is None else self._folder.path(step)
        if path is None:
            return []
        manifest, named = CheckpointManifest.read(path), step is None

        def refuse_other() -> None:
            if self._is_chief:
                manifest.refuse_other(self._manifest, path, self._options.elastic, named)

        # no rank loads first: parameters of another model do not fit, and that would be the error
        run_or_fail_together(self._group, f"{path}: cannot be compared with this run", refuse_other)
        self._engine.rehearse(self._loop.micro_batches()[0])
        if manifest.format == "full":
            load_full(self._engine, path)
        else:
            load_sharded(path, self._engine.shards())
        events = self._load_rank(path, manifest)
        self._loop.step, self._loop.sample = manifest.step, manifest.sample
        if self._is_chief:
            run = f"{self._plan.run} seed {self._plan.seed}"
            instead = "" if named or self._named is None else f", and not from {self._named}"
            say(f"{run}: continues after step {manifest.step} ({path}){instead}")
        # loading may have taken longer than the timeout of a step: wait in this group
        dist.barrier(self._group)
        return events

    def step_done(self, events: Sequence[StepEvent]) -> None:
        """Save a checkpoint every `train.checkpoint.every` steps.

        Args:
            events: of all steps so far.

        Raises:
            UserError: this checkpoint, or the one before if it was asynchronous, cannot be written.
        """
        if self._loop.step % self._options.every:
            return
        self.wait()
        step, sample = self._loop.step, self._loop.sample
        state = {**self._engine.rank_state(), "random": random_state(self._engine.device)}
        ledger = self._engine.ledger.sums()  # first: now the events, too, know what the device did
        values = json.dumps({"events": [vars(event) for event in events], "ledger": ledger})
        write = partial(self._write, step, sample, self._tensor_writer(), state, values)
        if self._options.asynchronous:
            self._background.start(write)
        else:
            write()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk; raise the error of an asynchronous one."""
        self._background.wait()

    def _tensor_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the present parameters and moments, now or later."""
        if self._options.format == "full":
            whole = gather_full(self._engine, writer=self._is_chief)
            return partial(write_full, whole) if self._is_chief else lambda _: None
        shards = self._engine.agreed_shards()
        if self._options.asynchronous:
            shards = {kind: in_host_memory(tensors) for kind, tensors in shards.items()}
        return partial(write_sharded, shards, self._group)

    def _write(
        self,
        step: int,
        sample: int,
        write_tensors: Callable[[Path], None],
        state: EngineState,
        values: str,
    ) -> None:
        folder = self._folder.unfinished(step)
        with _one_line_errors(folder):
            if self._is_chief:
                self._folder.begin(step)
            dist.barrier(self._group)
            if not folder.is_dir():
                raise UserError(f"{folder}: rank {self._rank} does not see it: share it with all")
            write_tensors(folder)
            file = _rank_file(folder, self._rank)
            save_state(file, state)
            file.with_suffix(".json").write_text(values)
            dist.barrier(self._group)
            parts = gather_values(sha256_of_files(folder, self._share), self._group)
            if self._is_chief:
                files = {name: digest for part in parts for name, digest in part.items()}
                position = {"step": step, "sample": sample, "files": files}
                self._manifest.model_copy(update=position).write(folder)
                self._folder.commit(step, self._options.keep)
            dist.barrier(self._group)

    @cached_property
    def _manifest(self) -> CheckpointManifest:
        """Manifest of this run before its first step."""
        return CheckpointManifest.of(self._plan, self._options.format)

    def _last_whole(self) -> int | None:
        """Return the step of the last checkpoint without damage.

        Raises:
            UserError: there are checkpoints, but none is whole.
        """
        [steps, *_] = gather_values(self._folder.steps() if self._is_chief else [], self._group)
        for step in reversed(steps):
            # every rank verifies its share before any rank loads
            path = self._folder.path(step)
            reports = gather_values(damage_in(path, self._share), self._group)
            damage = next(filter(None, reports), None)
            if damage is None:
                return int(step)
            if step == steps[0]:
                fix = f"no checkpoint before it is whole: remove {path.parent} to start anew"
                raise UserError(f"{damage}; {fix}")
            if self._is_chief:
                say(f"{damage}: continues from the checkpoint before it")
        return None

    def _whole_named(self) -> Path | None:
        """Return the path of the checkpoint that the user named, if any.

        Raises:
            UserError: it is damaged, or none.
        """
        if self._named is None:
            return None
        reports = gather_values(damage_in(self._named, self._share), self._group)
        if damage := next(filter(None, reports), None):
            raise UserError(f"{damage}: name another checkpoint, a folder such as step-00000050")
        return self._named

    def _load_rank(self, path: Path, manifest: CheckpointManifest) -> list[StepEvent]:
        """Load the state of this rank, or merge those of another number of ranks."""
        same_strategy = manifest.strategy.hash() == self._plan.strategy.hash()
        count = manifest.train.world_size
        if count == self._world_size:
            state, events, ledger = _read_rank(path, self._rank)
            set_random_state(state["random"], self._engine.device)
        else:
            states, all_events, ledgers = zip(
                *(_read_rank(path, r) for r in range(count)), strict=True
            )
            events, ledger = merge_events(all_events), mean_ledger(ledgers, 1)
            if not self._is_chief:  # the end of the run adds the squares of all ranks again
                events = [{**event, "residual_norm": None} for event in events]
            if self._is_chief and self._plan.strategy.sync is not None:
                say(f"{path}: of {count} ranks: begins with what all agreed on, and fresh moments")
            communication = [state["communication"] for state in states]
            state = {"extra": states[0]["extra"]}
            if same_strategy:
                state["communication"] = merge_states(communication, self._world_size, self._rank)
        if same_strategy:
            self._engine.load_rank_state(state)
        elif self._is_chief:
            say(f"{path}: warning: of another strategy: error feedback starts from zero")
        self._engine.ledger.load_sums(ledger)
        return [StepEvent(**event) for event in events]


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _read_rank(
    folder: Path, rank: int
) -> tuple[EngineState, list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return state, events and ledger sums of one rank."""
    file = _rank_file(folder, rank)
    values = json.loads(file.with_suffix(".json").read_text())
    state: EngineState = {"communication": {}, "extra": {}, **load_state(file)}
    return state, values["events"], values["ledger"]


def gather_full(engine: Engine, writer: bool) -> EngineState:
    """Gather the parameters and moments of all ranks on the writer.

    The others hold one whole entry of `Engine.agreed_shards()` at a time, and return nothing.
    """
    whole: EngineState = {}
    for kind, tensors in engine.agreed_shards().items():
        for entry, tensor in tensors.items():
            parts = engine.gather(entry, tensor)
            if writer:
                whole.setdefault(kind, {}).update(in_host_memory(parts))
    return whole


def write_full(whole: EngineState, folder: Path) -> None:
    """Write the result of `gather_full` into the folder of a checkpoint."""
    moments = {kind: tensors for kind, tensors in whole.items() if kind != "parameter"}
    save_tensors(folder / _MODEL, whole["parameter"])
    save_state(folder / _OPTIMIZER, moments)


def load_full(engine: Engine, folder: Path) -> None:
    """Load the part of every rank, with one whole entry of `Engine.shards()` at a time.

    Values are rounded to nearest in the dtype of the engine's tensors.

    Raises:
        UserError: the checkpoint is of another model, or of one for longer or shorter sequences.
    """
    with safe_open(folder / _MODEL, "pt") as model, safe_open(folder / _OPTIMIZER, "pt") as moments:
        for kind, tensors in engine.shards().items():
            file, prefix = (model, "") if kind == "parameter" else (moments, f"{kind}.")
            for entry, tensor in tensors.items():
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                for name, part in engine.split(entry, whole).items():
                    part.copy_(_of_shape(file, prefix + name, part.shape, folder))
                if isinstance(tensor, DTensor):  # every rank has the whole: no communication
                    mesh, placements = tensor.device_mesh, tensor.placements
                    whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                tensor.copy_(whole)


def _of_shape(file: Any, name: str, shape: torch.Size, folder: Path) -> torch.Tensor:
    """Read a tensor, which `copy_` would spread where it is smaller."""
    saved = list(file.get_slice(name).get_shape()) if name in file.keys() else None  # noqa: SIM118
    if saved != list(shape):
        raise UserError(
            f"{folder}: {name!r} has shape {saved}, here it is {list(shape)}: set "
            "train.sequence_length back"
        )
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def write_sharded(shards: EngineState, group: dist.ProcessGroup, folder: Path) -> None:
    """Write the shards of all ranks into the folder of a checkpoint; replicated tensors once.

    Args:
        group: of all ranks, which nothing else may use concurrently.
    """
    storage = HuggingFaceStorageWriter(str(folder / _SHARDED), save_distributed=True)
    dcp.save(dict(shards), storage_writer=storage, process_group=group)


def load_sharded(folder: Path, shards: EngineState) -> None:
    """Fill `shards` in place, without communication.

    Raises:
        UserError: the checkpoint has other units.
    """
    storage = HuggingFaceStorageReader(str(folder / _SHARDED))
    saved = storage.read_metadata().state_dict_metadata
    for kind, tensors in shards.items():
        for name, tensor in tensors.items():
            metadata = saved.get(f"{kind}.{name}")
            if not isinstance(metadata, TensorStorageMetadata) or metadata.size != tensor.shape:
                raise UserError(
                    f"{folder}: holds no {kind} {name!r} of shape {list(tensor.shape)}: a sharded "
                    "checkpoint serves the units that it was made of: go on with the engine, wrap "
                    "and train.sequence_length that made it, or save with "
                    "train.checkpoint.format: full"
                )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(dict(shards), storage_reader=storage, no_dist=True)


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one line for the user."""
    try:
        with writing(folder):
            yield
    except CheckpointException as failed:
        with writing(folder):
            raise next(iter(failed.failures.values()))[0] from failed
