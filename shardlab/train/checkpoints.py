"""Periodic checkpoints of a run, and resumption from the last."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardlab.comm.background import Background
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.config.schema import Checkpoint
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_files, writing
from shardlab.core.progress import say
from shardlab.engines.base import Engine
from shardlab.engines.state_files import in_host_memory, random_state, set_random_state
from shardlab.train.checkpoint_folder import Folder, Manifest, damage_in, read_manifest
from shardlab.train.checkpoint_formats import (
    gather_full,
    load_full,
    load_sharded,
    write_full,
    write_sharded,
)
from shardlab.train.loop import Loop, StepEvent
from shardlab.train.rank_file import RankState, merged_state
from shardlab.train.run_plan import RunPlan


class Checkpoints:
    """Checkpoints of one run. All ranks call the same methods in the same order.

    Laws:
    - a run that resumes with the same plan ends bit for bit as if it had not been interrupted;
    - a process that is killed at any time leaves the last checkpoint whole for the next start.

    Args:
        root: a folder that all ranks share.
        group: of the ranks that train.
    """

    def __init__(
        self,
        plan: RunPlan,
        options: Checkpoint,
        root: Path,
        engine: Engine,
        loop: Loop,
        group: dist.ProcessGroup,
    ) -> None:
        self._plan = plan
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
        """Resume from the last whole checkpoint; return the events of the steps that are done.

        Raises:
            UserError: all checkpoints are damaged, or it is of another experiment.
        """
        step = self._last_whole()
        if step is None:
            return []
        path = self._folder.path(step)
        manifest = read_manifest(path)

        def refuse_other() -> None:
            if self._is_chief:
                manifest.refuse_other(self._manifest, path, self._options.elastic)

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
            known = manifest.made_by() == self._manifest.made_by()
            who = "" if known else f", made by {manifest.made_by()}"
            run = f"{self._plan.run} seed {self._plan.seed}"
            say(f"{run}: continues after step {step} ({path}{who})")
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
        if self._loop.step % self._options.every == 0:
            self._save(events)

    def finish(self) -> None:
        """Wait until all checkpoints are on disk; raise the error of an asynchronous one."""
        self._background.drain()

    def _save(self, events: Sequence[StepEvent]) -> None:
        self.finish()
        step, sample = self._loop.step, self._loop.sample
        state = {**self._engine.rank_state(), "random": random_state()}
        ledger = self._engine.ledger.sums()  # first: now the events, too, know what the device did
        mine = RankState(state, [vars(event) for event in events], ledger)
        arguments = step, sample, self._tensor_writer(), mine
        if self._options.asynchronous:
            self._background.start(self._write, *arguments)
        else:
            self._write(*arguments)

    def _tensor_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the present parameters and moments, now or later."""
        if self._options.format == "full":
            whole = gather_full(self._engine, writer=self._is_chief)
            return partial(write_full, whole=whole) if self._is_chief else lambda _: None
        shards = self._engine.shards()
        if self._options.asynchronous:
            shards = {kind: in_host_memory(tensors) for kind, tensors in shards.items()}
        return partial(write_sharded, shards=shards, group=self._group)

    def _write(
        self, step: int, sample: int, write_tensors: Callable[[Path], None], mine: RankState
    ) -> None:
        folder = self._folder.unfinished(step)
        with _one_line_errors(folder):
            if self._is_chief:
                self._folder.begin(step)
            dist.barrier(self._group)
            if not folder.is_dir():
                raise UserError(f"{folder}: rank {self._rank} does not see it: share it with all")
            write_tensors(folder)
            mine.write(folder, self._rank)
            dist.barrier(self._group)
            files = self._checksums(folder)
            if self._is_chief:
                position = {"step": step, "sample": sample}
                self._manifest.model_copy(update=position).write(folder, files)
                self._folder.commit(step)
                self._folder.prune(self._options.keep)
            dist.barrier(self._group)

    def _checksums(self, folder: Path) -> dict[str, str]:
        """Return the checksums of all files, each computed by one rank."""
        own = sha256_of_files(folder, self._share)
        return {name: d for each in gather_values(own, self._group) for name, d in each.items()}

    @cached_property
    def _manifest(self) -> Manifest:
        """Manifest of this run before its first step; on rank 0 alone, since it runs git."""
        return Manifest.of(self._plan, self._options.format)

    def _last_whole(self) -> int | None:
        """Return the step of the last checkpoint without damage, after setting aside later ones.

        Raises:
            UserError: there are checkpoints, but none is whole.
        """
        if self._is_chief:
            self._folder.clear()
        steps: list[int]
        [steps, *_] = gather_values(self._folder.steps() if self._is_chief else [], self._group)
        for step in reversed(steps):
            # every rank verifies its share before any rank loads
            path = self._folder.path(step)
            found = gather_values(damage_in(path, self._share), self._group)
            damage = next(filter(None, found), None)
            if damage is None:
                return step
            if step == steps[0]:
                fix = f"no checkpoint before it is whole: remove {path.parent} to start anew"
                raise UserError(f"{damage}; {fix}")
            if self._is_chief:
                say(f"{damage}: continues from the checkpoint before it")
                self._folder.set_aside(step)
        return None

    def _load_rank(self, path: Path, manifest: Manifest) -> list[StepEvent]:
        """Load the state of this rank, or merge those of another number of ranks."""
        known = manifest.strategy.hash() == self._plan.strategy.hash()
        if manifest.train.world_size == self._world_size:
            mine = RankState.read(path, self._rank)
            set_random_state(mine.state["random"])
            state = mine.state
        else:
            ranks = [RankState.read(path, rank) for rank in range(manifest.train.world_size)]
            mine = RankState.merged(ranks)
            state = merged_state(ranks, self._world_size, self._rank) if known else {}
        if known:
            self._engine.load_rank_state(state)
        elif self._is_chief:
            say(f"{path}: of another strategy: error feedback starts from zero")
        self._engine.ledger.load_sums(mine.ledger)
        return [_event(event, path) for event in mine.events]


def _event(values: dict[str, Any], path: Path) -> StepEvent:
    try:
        return StepEvent(**values)
    except TypeError:
        raise UserError(
            f"{path}: another version of shardlab made it: remove it, and the run starts anew"
        ) from None


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one line for the user."""
    try:
        with writing(folder):
            yield
    except CheckpointException as failed:
        with writing(folder):
            raise next(iter(failed.failures.values()))[0] from failed
