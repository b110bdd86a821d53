"""Timings of one file: one alone, or several on one machine whose repetitions take turns."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardlab.codecs import native
from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.config.race_record import Ruling
from shardlab.config.timing_record import read_timings, write_timings
from shardlab.core.errors import UserError
from shardlab.core.files import temporary
from shardlab.core.progress import say
from shardlab.train.interleaved import interleave, launch_plan
from shardlab.train.launch import launch_together
from shardlab.train.launch_environment import rank_environment
from shardlab.train.timing_plan import TimingPlan
from shardlab.train.turns import Alone, Turn, Turns


def time_strategies(plans: Sequence[TimingPlan], output: Path) -> None:
    """Write a `TimedRun` of every run of the plans, in their order.

    Raises:
        RunFailed: a rank failed; `output` is as it was.
        UserError: the data, the model or a link cannot be used; or there are several plans, and
            torchrun or srun started this process.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    if len(plans) == 1:
        _time(plans[0], output, lambda rank: Alone())
        return
    first, *others = (plan.name for plan in plans)
    if rank_environment(plans[0].timing.world_size) is not None:
        raise UserError(
            f"timings.{first}.interleaved: timings take turns on one machine, without torchrun or "
            f"srun: move {', '.join(others)} to timings"
        )
    turns = Turns([plan.timing.world_size for plan in plans])
    with temporary("shardlab-timings") as folder:
        files = [folder / f"{plan.name}.jsonl" for plan in plans]
        launch_together(
            {
                f"timing {plan.name}": partial(_time, plan, file, partial(turns.of, number))
                for number, (plan, file) in enumerate(zip(plans, files, strict=True))
            }
        )
        timed = [run for file in files for run in read_timings(file, "time again")]
        write_timings(output, timed)


def _time(plan: TimingPlan, output: Path, turn: Callable[[int], Turn]) -> None:
    with emulated(plan.timing.link, plan.timing.world_size) as link:
        launch_plan(plan, link, partial(_work, plan, link, output, turn))


def _work(
    plan: TimingPlan,
    link: Emulation,
    output: Path,
    turn_of: Callable[[int], Turn],
    group: dist.ProcessGroup,
) -> None:
    def look(step_ms: dict[str, list[float]]) -> Ruling:
        return Ruling()

    def mark(run: str) -> None:
        pass

    turn = turn_of(dist.get_rank(group))
    whole = interleave(plan, link, plan.timing.repetitions, look, mark, turn, group)
    timed = whole.timed(mark)
    if timed:
        write_timings(output, timed)
        say(f"{plan.name}: {len(timed)} runs of {plan.timing.repetitions} repetitions")
    dist.barrier(group)
    turn.leave()
