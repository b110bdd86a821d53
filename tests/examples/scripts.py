"""Scripts that torchrun starts, as their users do, in forks of the tests: none takes imports."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.commands import TORCHRUN, forked

ROOT = Path(__file__).parents[2]


def on_two_ranks(folder, script, *arguments):
    """Return what a script of the project said that ended well."""
    options = ["--standalone", "--nproc-per-node=2"]
    command = forked(folder, [*TORCHRUN, *options, str(ROOT / script), *arguments])
    assert command.wait(240) == 0, command.said()[-3000:]
    return command.said()


def scalars(folder):
    """What TensorBoard shows of the one run below a folder, by tag: the values by their step."""
    (path,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
