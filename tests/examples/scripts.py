"""Scripts that torchrun starts, as their users do, in forks of the tests: none takes imports."""

from pathlib import Path

from tests.commands import TORCHRUN, forked

ROOT = Path(__file__).parents[2]


def on_two_ranks(folder, script, *arguments):
    """Return what a script of the project said that ended well."""
    options = ["--standalone", "--nproc-per-node=2"]
    command = forked(folder, [*TORCHRUN, *options, str(ROOT / script), *arguments])
    assert command.wait(240) == 0, command.said()[-3000:]
    return command.said()
