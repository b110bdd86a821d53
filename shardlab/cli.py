"""The command line: every command and its options.

`shardlab NAME` runs one, as Snakemake and DVC do. It is imported once its arguments are right, so
that help and mistakes need neither packages nor seconds.
"""

import argparse
import gc
import io
import math
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shardlab import __version__
from shardlab.core.arguments import count, nodes, positive
from shardlab.core.errors import RunFailed, UserError, nearest


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line (exit 2)."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake without the usage, and end."""
        _fail(f"{self.prog.rpartition(' ')[2]}: error: {message}; see {self.prog} --help")


def _one(name: str, words: str) -> Callable[[Parser], None]:
    """Return a function that adds one argument, a text."""

    def add(parser: Parser) -> None:
        parser.add_argument(name, metavar=name.upper(), help=words)

    return add


def _add_params(parser: Parser) -> None:
    parser.add_argument("--params", default="params.yaml", help="YAML or JSON file (params.yaml)")
    add, words = parser.add_argument, "override a parameter"
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=words)


def _add_strategies(parser: Parser) -> None:
    words = "a name in params, all, or a document, as '{engine: ddp, gradients: {codec: int8}}'"
    add = parser.add_argument
    add("--strategy", dest="strategies", action="append", default=[], help=f"yours: {words}")
    add("--params", default="params.yaml", help="file with the names (params.yaml)")


def _plan(parser: Parser) -> None:
    from shardlab.models.settings import GPT2_VOCABULARY, PRESETS
    from shardlab.models.shapes import PUBLISHED
    from shardlab.predict.devices import DEVICES

    add = parser.add_argument
    words = (
        f"one of {', '.join([*PRESETS, *PUBLISHED])}; a config.json or its folder; or on the hub"
    )
    add("model", metavar="MODEL", help=words)
    add("--nodes", type=nodes, default=(1, 1), help="nodes x devices of each, as in 2x8 (1x1)")
    add("--device", required=True, help=f"{', '.join(DEVICES)}, cpu")
    add("--link", help="rate of a node's link in one direction, such as 10gbit")
    add("--delay-ms", type=positive, default=0.025, help="latency between nodes (0.025)")
    add("--inside", help="connection inside a node: nvlink, pcie4, ...; or a rate of a device")
    _add_batch(parser, 8, 2048)
    add("--vocabulary", type=int, help=f"tokens of a preset ({GPT2_VOCABULARY})")
    add("--param-dtype", "--dtype", choices=("bf16", "fp16", "fp32"), help="(the device's fastest)")
    words, modes = "(the fastest that fits)", ("none", "selective", "full")
    add("--activation-checkpointing", "--checkpointing", choices=modes, help=words)
    add("--host-memory", type=positive, default=math.inf, help="GB of a node (any)")
    words = "share of the peak in percent (of public measurements)"
    add("--efficiency", type=positive, nargs=2, metavar=("LOW", "HIGH"), help=words)
    add("--peak", type=positive, help="TFLOPS of --device cpu")
    add("--memory", type=positive, help="GB of --device cpu")
    add("--bandwidth", type=positive, help="GB/s of the memory of --device cpu")
    _add_strategies(parser)
    add("--tokens", type=count, default=0.0, help="to train on, such as 15T")
    words = "of a device-hour, with --tokens: a number, or gpuhunt (the cheapest to rent)"
    add("--price", type=lambda word: word if word == "gpuhunt" else positive(word), help=words)
    add("--json", action="store_true", help="print everything as JSON")


def _probe(parser: Parser) -> None:
    from shardlab.models.settings import GPT2_VOCABULARY

    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset; or folder, config.json or name on the hub")
    _add_batch(parser, 8, 512)
    add("--vocabulary", type=int, help=f"tokens of a preset ({GPT2_VOCABULARY})")
    add("--codec", default="int4", help="the strongest compression (int4)")
    _add_strategies(parser)
    add("--param-dtype", "--dtype", choices=("fp32", "bf16"), default="fp32", help="of autocast")


def _add_batch(parser: Parser, sequences: int, tokens: int) -> None:
    add, words = parser.add_argument, f"per device and step ({sequences})"
    add("--batch-size", "--batch", type=int, default=sequences, help=f"sequences {words}")
    words = f"tokens of a sequence ({tokens})"
    add("--sequence-length", "--seq", type=int, default=tokens, help=words)


def _trace(parser: Parser) -> None:
    words = "trace of a rank, or a merged one, also .gz; or a folder, which is searched"
    parser.add_argument("paths", nargs="+", metavar="PATH", help=words)
    parser.add_argument("--csv", metavar="FILE", help="write a row per step and rank")
    parser.add_argument("--html", metavar="FILE", help="write the tables as one page")


def _attach(parser: Parser) -> None:
    words = "train a model of ours; in a script of yours you call shardlab.attach"
    parser.add_argument("--demo", action="store_true", required=True, help=words)
    words = "such as int4 (int8)"
    parser.add_argument("--gradients", metavar="CODEC", default="int8", help=words)


def questions() -> dict[str, tuple[str, str]]:
    """Return what `shardlab init` asks by the name of its option, with the default."""
    from shardlab.models.settings import PRESETS

    return {
        "text": ("text: a file or folder of yours, or wikipedia", "wikipedia"),
        "model": (f"size of the model: {', '.join(PRESETS)}", "tiny"),
        "world_size": ("ranks on this machine", "2"),
        "link": ("rate of the link between them, such as 100mbit, or none", "100mbit"),
        "minutes": ("minutes until the report", "15"),
    }


def _init(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a new one; or that of an experiment")
    for name, (words, default) in questions().items():
        flags = [f"--{name}"] if name != "world_size" else ["--world-size", "--ranks"]
        parser.add_argument(*flags, metavar="ANSWER", help=f"{words} ({default})")


def _search(parser: Parser) -> None:
    add = parser.add_argument
    add("--link", required=True, help="rate between ranks, such as 100mbit; none: loopback")
    words = "processes on this machine"
    add("--world-size", "--ranks", type=int, required=True, help=words)
    add("--minutes", type=int, default=10, help="time after which no further round begins (10)")
    add("--model", help="preset, or folder with a config.json; else as in params")
    add("--name", help="folder in searches/; else from link and ranks")
    _add_params(parser)


def _train(parser: Parser) -> None:
    add = parser.add_argument
    add("--run", required=True, help="name of a strategy in the parameters")
    add("--seed", type=int, default=0, help="of weights, order of data and random codecs (0)")
    words = "how often to start new ranks after one has failed (0)"
    add("--max-restarts", type=int, default=0, help=words)
    add("--resume", metavar="FOLDER", help="checkpoint to begin from, such as step-00000050")
    words = "print which CPUs each rank gets, and end"
    add("--show-placement", action="store_true", help=words)


def _chat(parser: Parser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="final_model of a run, or another model")
    add("--prompt", help="answer this alone, and end")
    add("--temperature", type=float, help="0: the likeliest token (0.8)")
    add("--top-p", type=float, help="the likeliest tokens with this probability together (0.95)")
    add("--tokens", type=int, help="longest answer; at most half of the positions (200)")
    add("--seed", type=int, help="(another one for each conversation)")


def _evaluate(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a run of this experiment, or on the hub")
    words = "a file or folder, wikipedia, or as in params, '{source: jsonl, path: FILE}'"
    add("--data", metavar="TEXT", required=True, help=words)
    add("--length", type=int, help="tokens of a sequence (the model's positions, at most 1024)")
    add("--batch", type=int, help="sequences of a forward pass (8)")
    add("--json", dest="as_json", action="store_true", help="print everything as JSON")


def _trial(parser: Parser) -> None:
    add = parser.add_argument
    add("number", metavar="ROUND")
    add("--start", default="", help="command that starts ranks, such as srun -n 8; none: forks")
    add("--step", default="", help="do a part of the trial, which this JSON describes")


class Command(NamedTuple):
    """A line of the table."""

    help: str
    example: str = ""
    options: Callable[[Parser], None] = lambda parser: None
    module: str = ""
    """module with its function `main`; by default `stages.NAME`"""
    extra: str = "lab"
    """optional dependency that has all packages of the command"""
    log: tuple[str, ...] = ()
    """options of a stage whose values name its log"""
    launcher: str = ""
    """in the example, what starts its ranks"""


_RUN, _ROUND = _one("run", "name of a strategy"), _one("number", "number of a round")
_METHOD = _one("method", "name of a method")
_USERS = {
    "plan": Command(
        "say what a model needs on hardware you have not rented, and what is fastest",
        "llama-3-8b --nodes 2x8 --device a100-80g --link 10gbit",
        _plan,
        module="shardlab.plan",
        extra="hf",
    ),
    "probe": Command(
        "measure synchronisation against computation: torchrun ... -m shardlab probe MODEL",
        "tiny --batch-size 8 --sequence-length 64",
        _probe,
        module="shardlab.probe",
        extra="hf",
        launcher="torchrun --nproc-per-node 2 -m ",
    ),
    "trace": Command(
        "break traces of torch.profiler down: what would hiding communication give?",
        "traces/ --html trace.html",
        _trace,
    ),
    "attach": Command(
        "show on two ranks of this machine what shardlab.attach sends and saves",
        "--demo",
        _attach,
    ),
    "init": Command(
        "write an experiment on your text into a folder; into that of an experiment the files of "
        "both tools again",
        "mine --text book.txt --model tiny --world-size 2 --link 100mbit --minutes 15",
        _init,
    ),
    "run": Command(
        "make all results of params.yaml with Snakemake, which gets other options, and show the "
        "headline",
    ),
    "search": Command(
        "search for the fastest strategy of a tolerated perplexity",
        "--link 100mbit --world-size 2 --minutes 10",
        _search,
    ),
    "chat": Command(
        "talk to a trained model, or to any model in a folder",
        'results/train/fsdp2/seed0/final_model --prompt "Once"',
        _chat,
        extra="hf",
    ),
    "evaluate": Command(
        "measure perplexity and bits per byte of any trained model on any text",
        "results/train/fsdp2/seed0/final_model --data book.txt",
        _evaluate,
    ),
}
STAGES = {
    "train": Command(
        "train one run with one seed, on ranks of this machine or as one rank of torchrun or srun",
        "--run fsdp2-int8 --seed 0",
        _train,
        log=("run", "seed"),
    ),
    "validate": Command(
        "measure perplexity and bits per byte of a trained run", "fsdp2-int8", _RUN, log=("run",)
    ),
    "tune": Command(
        "tune a method, and train it until it reaches a loss", "stock", _METHOD, log=("method",)
    ),
    "timing": Command(
        "time the interleaved steps of a timing",
        "two-ranks",
        _one("name", "its name"),
        log=("name",),
    ),
    "report": Command("write the comparison again: tables, plots, page"),
    "estimate": Command("estimate the memory of every run before it, in closed form"),
    "calibrate": Command("measure the costs of single operations, for the forecast"),
    "forecast": Command("fit the performance model on a few timings, and extrapolate"),
    "params": Command("validate params.yaml, and write what stages depend on"),
    "inputs": Command(
        "record what an input holds", "text", _one("name", "its name"), log=("name",)
    ),
    "prepare": Command("convert the text of any source into documents"),
    "tokenize": Command("build the tokenizer, the token shards and their statistics"),
    "profile": Command("break the profiled steps of a run down", "fsdp2-int8", _RUN, log=("run",)),
    "collect": Command("join what was measured of each run and seed into one record"),
    "propose": Command("choose what a round races", "1", _ROUND, log=("number",)),
    "trial": Command("race strategies, and train the fastest", "1", _trial, log=("number",)),
    "decide": Command("accept or roll back what a round has raced", "1", _ROUND, log=("number",)),
}
"""stages of an experiment: `main` takes the parameters first"""
COMMANDS = {**_USERS, **STAGES}


def main(arguments: list[str] | None = None) -> None:
    """Run `shardlab ARGUMENTS`; those of the command line when not given."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and signs that the encoding of the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
        _run(name, parse(name, others))
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # who reads the output may stop, such as head; what is left goes nowhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def parse(name: str, arguments: list[str]) -> dict[str, Any]:
    """Return the options of a command; print help or a mistake, and end, where they are none."""
    tree, commands = _tree()
    if not name.startswith("-") and name not in COMMANDS:
        _fail(f"shardlab: error: no command {name!r}; {nearest(name, COMMANDS)}")
    if name in COMMANDS:
        # only of this one, since help texts need imports
        COMMANDS[name].options(commands[name])
    if name in STAGES:
        _add_params(commands[name])
    options, others = tree.parse_known_args([name, *arguments])
    if name == "run":
        return {"arguments": others}
    if others:
        commands[name].error(f"unrecognized arguments: {' '.join(others)}")
    return {key: value for key, value in vars(options).items() if key != "command"}


def _tree() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parsers of the commands by name, still without options."""
    tree = Parser(
        "shardlab",
        description="How to shard, compress and synchronise the training of a model.",
        epilog="shardlab NAME --help shows the options of one, with an example.\n"
        'Completion in bash: eval "$(shardlab --completion)"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tree.add_argument("--version", action="version", version=f"shardlab {__version__}")
    script = f"complete -W '{' '.join(COMMANDS)}' -o default shardlab"
    tree.add_argument("--completion", action="version", version=script, help=argparse.SUPPRESS)
    commands = tree.add_subparsers(dest="command", metavar="NAME", required=True)
    for name, command in COMMANDS.items():
        words = command.help
        parser = commands.add_parser(name, help=words, description=words)
        parser.epilog = f"example: {command.launcher}shardlab {name} {command.example}".rstrip()
        # an example may not be broken at a hyphen
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return tree, commands.choices


def _run(name: str, options: dict[str, Any]) -> None:
    command = COMMANDS[name]
    try:
        if name in STAGES and {"SHARDLAB_LOCK", "DVC_STAGE"} & os.environ.keys():
            # a job ends with its tool, also amid imports; what was typed may outlive its shell
            import_module("shardlab.core.process").die_with_parent(os.getppid(), signal.SIGTERM)
        # all that is imported stays: to search it for garbage takes a quarter of the imports' time
        gc.disable()
        if not command.module:
            _alias_stages()
        call = import_module(command.module or f"stages.{name}").main
        gc.enable()
        if name in STAGES:
            import_module("stages.common").run(name, call, options)
        else:
            call(**options)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("shardlab", "stages"):
            raise
        _fail(f"{name}: error: {package} is missing: pip install 'shardlab[{command.extra}]'")
    except UserError as error:
        # mistakes in the parameters are a line each
        _fail("\n".join(f"{name}: error: {line}" for line in str(error).split("\n")))
    except RunFailed as error:
        _fail(f"{name}: error: {error}", code=1)


def _alias_stages() -> None:
    """Import the package of that name: beside this one or, in a wheel, a part of it."""
    if (Path(__file__).parents[1] / "stages/__init__.py").exists():
        import_module("stages")
    else:
        sys.modules.setdefault("stages", import_module("shardlab.stages"))


def _fail(message: str, code: int = 2) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)
