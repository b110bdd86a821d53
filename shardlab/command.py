"""The command `shardlab`: a table of what stages and library do, imported when it is called."""

import io
import os
import runpy
import signal
import sys
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from shardlab import __version__
from shardlab.core.errors import nearest


class Command(NamedTuple):
    """One line of the table."""

    module: str
    """one of `stages`, which is run like `python -m MODULE`, or one with `main(arguments)`"""
    help: str
    example: str
    extra: str = "lab"
    """optional dependency with all packages that it imports"""


COMMANDS = {
    "plan": Command(
        "shardlab.plan",
        "say what a model needs on devices that nobody rented yet, and what is fastest",
        "llama-3-8b --nodes 2x8 --device a100-80g --link 10gbit",
        extra="hf",
    ),
    "trace": Command(
        "stages.trace",
        "break traces of torch.profiler down: what would hiding communication give?",
        "traces/ --html trace.html",
    ),
    "attach": Command(
        "stages.attach",
        "show on two ranks of this machine what shardlab.attach sends and saves",
        "--demo",
    ),
    "init": Command(
        "stages.init",
        "write an experiment on your text into a folder",
        "mine --text book.txt --model tiny --ranks 2 --link 100mbit --minutes 15",
    ),
    "run": Command("stages.run", "make all results of params.yaml, and show the headline", ""),
    "time": Command("stages.timing", "time the interleaved steps of a timing", "two-ranks"),
    "search": Command(
        "stages.search",
        "search for the fastest strategy of a tolerated perplexity",
        "--link 100mbit --ranks 2 --minutes 10",
    ),
    "train": Command("stages.train", "train one run with one seed", "--run fsdp2-int8 --seed 0"),
    "evaluate": Command(
        "stages.validate", "measure perplexity and bits per byte of a trained run", "fsdp2-int8"
    ),
    "chat": Command(
        "stages.chat",
        "talk to a trained model, or any model in a folder",
        'results/train/fsdp2/seed0/final_model --prompt "Once"',
        extra="hf",
    ),
    "report": Command("stages.report", "write the comparison again: tables, plots, page", ""),
}


def main(arguments: list[str] | None = None) -> None:
    """Run `shardlab ARGUMENTS`; those of the command line when not given."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and signs that the encoding of the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if name in ("-h", "--help"):
            print(_help())
        elif name == "--version":
            print(f"shardlab {__version__}")
        elif name == "--completion":
            print(f"complete -W '{' '.join(COMMANDS)}' -o default shardlab")
        elif name not in COMMANDS:
            _fail(f"shardlab: error: no command {name!r}; {nearest(name, COMMANDS)}")
        else:
            _run(name, others)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # who reads the output may stop, such as head; what is left goes nowhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "How to shard, compress and synchronise the training of a model, and what it costs.",
            "",
            *lines,
            "",
            "shardlab NAME --help shows the options of one, with an example; shardlab --version.",
            'Completion in bash: eval "$(shardlab --completion)"',
        ]
    )


def _run(name: str, arguments: list[str]) -> None:
    command = COMMANDS[name]
    try:
        if not command.module.startswith("stages."):
            import_module(command.module).main(arguments)
            return
        stages = _stages()
        stages.program, stages.example = f"shardlab {name}", command.example
        stages.begin()
        sys.argv[1:] = arguments
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("shardlab", "stages"):
            raise
        _fail(
            f"shardlab {name}: error: {package} is missing: pip install 'shardlab[{command.extra}]'"
        )


def _stages() -> Any:
    """Return the package of that name: in a wheel it is a part of this one."""
    try:
        stages = import_module("shardlab.stages")
    except ModuleNotFoundError:
        return import_module("stages")
    return sys.modules.setdefault("stages", stages)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)
