"""Plan training before anything is rented: does it fit, how fast is it, and what does it cost?

MODEL is a preset, a published model, a config.json or its folder; any other name is one on the
Hugging Face hub, which needs the extra `hf`.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardlab.choose.plan_answer import lines, make_plan
from shardlab.config.machine import bits_per_second
from shardlab.config.model_and_data import GPT2_VOCABULARY, PRESETS, Model
from shardlab.config.schema import Train
from shardlab.core.arguments import Parser
from shardlab.core.errors import UserError, nearest
from shardlab.core.numbers import number
from shardlab.core.progress import say
from shardlab.models.shapes import PUBLISHED, DecoderShapes, read_decoder
from shardlab.predict.devices import (
    DEVICES,
    Device,
    Efficiency,
    cluster_of,
    efficiency,
    inside_rate,
)
from shardlab.predict.planner import RARE_HOST, Job, Shapes

_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


class _Facts(NamedTuple):
    """Sizes of a model that a plan depends on."""

    shapes: Shapes
    parameters: int
    flops_per_token: float


def _facts(options: argparse.Namespace) -> _Facts:
    """Read the model.

    Raises:
        UserError: it is absent, cannot be planned, or has fewer positions than the sequences.
    """
    train = Train(batch_size=options.batch, sequence_length=options.seq)
    decoder = read_decoder(options.model, options.vocabulary or GPT2_VOCABULARY, options.seq)
    if options.vocabulary and options.model not in PRESETS:
        raise UserError(f"--vocabulary is for presets: {options.model} has its own")
    if decoder is None:
        return _of_transformers(options.model, train)
    if decoder.positions is not None and decoder.positions < options.seq:
        raise UserError(
            f"--seq {options.seq}: {options.model} has {decoder.positions} positions: lower it"
        )
    shapes = DecoderShapes(decoder, train)
    try:
        flops = decoder.flops_per_token(options.seq)
    except OverflowError:
        raise UserError(f"MODEL {options.model!r} has sizes that no number holds") from None
    return _facts_of(options.model, shapes, decoder.parameters, flops)


def _of_transformers(name: str, train: Train) -> _Facts:
    try:
        # the extra `hf`, which a plan of a known type does without
        from shardlab.models.blocks import unplanned
        from shardlab.models.build import build_model
        from shardlab.models.sizes import ModelShapes
        from shardlab.train.utilization import flops_per_token
    except ModuleNotFoundError:
        raise UserError(
            f"MODEL {name!r}: no preset ({', '.join(PRESETS)}), no published model "
            f"({', '.join(PUBLISHED)}) and no config.json of a known type: for others "
            "pip install 'shardlab[hf]'"
        ) from None
    seq = train.sequence_length
    try:
        built = build_model(Model(config=name), 1, seq, 0, seed=0)
    except UserError as error:
        if Path(name).exists():
            # the option of this command that sets it
            raise UserError(str(error).replace("train.sequence_length:", "--seq")) from None
        raise UserError(f"{error}; {nearest(name, [*PRESETS, *PUBLISHED])}") from None
    model = built.module
    if reason := unplanned(model):
        raise UserError(f"MODEL {name!r} {reason}: not planned")
    shapes = ModelShapes(model, train, on_gpu=True)
    return _facts_of(name, shapes, built.parameters, flops_per_token(model, seq))


def _facts_of(name: str, shapes: Shapes, parameters: int, flops: float) -> _Facts:
    if parameters <= 0:
        raise UserError(f"MODEL {name!r} has no parameters")
    return _Facts(shapes, parameters, flops)


def _device(options: argparse.Namespace) -> Device:
    """Return the device of the table, or the CPU that options describe."""
    given = (options.peak, options.memory, options.bandwidth)
    example = "--peak 0.2 --memory 32 --bandwidth 20 --efficiency 50 80"
    if options.device == "cpu":
        if None in (*given, options.efficiency):
            raise UserError(f"--device cpu: describe it, as by {example}")
        peak, memory, bandwidth = given
        rates = bandwidth * 1e9, bandwidth * 1e9 / 2
        return Device(memory * 1e9, {"fp32": peak * 1e12}, *rates, inside="", source="options")
    if any(value is not None for value in given):
        raise UserError("--peak, --memory and --bandwidth are for --device cpu: remove them")
    if options.device not in DEVICES:
        # a chip without its memory, as in h100
        close = [name for name in DEVICES if name.startswith(f"{options.device}-")]
        known = ", ".join(close or [*DEVICES, "cpu"])
        raise UserError(f"--device {options.device!r}: known are {known}")
    return DEVICES[options.device]


def _check_used(options: argparse.Namespace) -> None:
    """Refuse what would change nothing.

    Raises:
        UserError: an option is of something that is not planned.
    """
    nodes, per_node = options.nodes
    for name, used, what in (
        ("link", nodes > 1, "several nodes: raise --nodes"),
        ("inside", per_node > 1, "nodes of several devices: raise --nodes"),
        ("price", options.tokens, "a number of tokens: give --tokens"),
    ):
        if getattr(options, name) is not None and not used:
            raise UserError(f"--{name} is for {what}, or remove it")


def _inside(options: argparse.Namespace, device: Device, per_node: int) -> tuple[float, str]:
    """Return bytes per second of a device inside its node, and their name."""
    if per_node == 1:
        return float("inf"), ""
    name = options.inside or device.inside
    if not name:
        raise UserError("--nodes: several devices of a node need --inside, such as 100gbit")
    if re.fullmatch(r"[\d.]+[kmg]bit", name):
        return bits_per_second(name) / 8, name
    return inside_rate(name, device), name


def _job(options: argparse.Namespace, facts: _Facts) -> tuple[Job, str]:
    """Return what is to be predicted, and its description."""
    _check_used(options)
    device = _device(options)
    nodes, per_node = options.nodes
    dtype = options.dtype or next(iter(device.peaks))
    if dtype not in device.peaks:
        raise UserError(f"--dtype {dtype}: {options.device} has {', '.join(device.peaks)}")
    if nodes > 1 and options.link is None:
        raise UserError("--nodes: several nodes need --link, such as --link 10gbit")
    inside, name = _inside(options, device, per_node)
    bits = bits_per_second(options.link) if nodes > 1 else 1e15
    share = efficiency(options.device, dtype, facts.parameters)
    if options.efficiency:
        low, high = sorted(options.efficiency)
        if low < 1 or high > 100:
            raise UserError(f"--efficiency {low:g} {high:g}: expected percent, from 1 to 100")
        share = Efficiency(low / 100, high / 100, "as given")
    known = options.host_memory < float("inf")
    rare = float("inf") if known else RARE_HOST * per_node * device.memory
    job = Job(
        shapes=facts.shapes,
        parameters=facts.parameters,
        flops=facts.flops_per_token * options.batch * options.seq,
        batch=options.batch,
        dtype=dtype,
        device=device,
        efficiency=share,
        cluster=cluster_of(device, per_node, inside, bits, options.delay_ms / 1e3),
        nodes=nodes,
        on_gpu=options.device != "cpu",
        checkpointing=options.checkpointing,
        host_bytes=options.host_memory * 1e9,
        rare_host_bytes=rare,
    )
    return job, _setup(options, facts, job, name, inside)


def _setup(options: argparse.Namespace, facts: _Facts, job: Job, name: str, inside: float) -> str:
    (nodes, per_node), share = options.nodes, job.efficiency
    text = (
        f"{options.model}: {number(facts.parameters)} parameters, "
        f"{number(facts.flops_per_token)} FLOPs per token; {options.batch} x {options.seq} tokens "
        f"per device and step; {nodes} x {per_node} {options.device}, {job.dtype} "
        f"at {100 * share.low:.0f} to {100 * share.high:.0f} % of its peak ({share.basis})"
    )
    if per_node > 1:
        text += f", {name} of {inside / 1e9:.0f} GB/s inside a node"
    return f"{text}, {options.link} between nodes" if nodes > 1 else text


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,2})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected nodes x devices, as in 2x8 (found {text!r})")
    return int(match[1]), int(match[2])


def _number(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+(e[+-]?\d{1,2})?", text.lower()) or not float(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0 (found {text!r})")
    return float(text)


def _count(text: str) -> float:
    factor = _SUFFIXES.get(text[-1:].lower())
    return _number(text) if factor is None else factor * _number(text[:-1])


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
            wanted = f"a whole number from {low} to {high:,}"
            raise argparse.ArgumentTypeError(f"expected {wanted} (found {text!r})")
        return int(text)

    return read


def _parser() -> Parser:
    about = (__doc__ or "").partition("\n")[0]
    example = "shardlab plan llama-3-8b --nodes 2x8 --device a100-80g --link 10gbit"
    as_it_is = argparse.RawDescriptionHelpFormatter  # an example may not be broken at a hyphen
    parser = Parser(
        "shardlab plan",
        description=about,
        epilog=f"example: {example}",
        formatter_class=as_it_is,
    )
    add = parser.add_argument
    add(
        "model", metavar="MODEL", help=f"one of {', '.join([*PRESETS, *PUBLISHED])}; or config.json"
    )
    add("--nodes", type=_nodes, default=(1, 1), help="nodes x devices of each, as in 2x8 (1x1)")
    add("--device", required=True, help=f"{', '.join(DEVICES)}, cpu")
    add("--link", help="rate of a node's link in one direction, such as 10gbit")
    add("--delay-ms", type=_number, default=0.025, help="latency between nodes (0.025)")
    add("--inside", help="connection inside a node: nvlink, pcie4, ...; or a rate of a device")
    add("--batch", type=_whole(1, 2**20), default=8, help="sequences per device and step (8)")
    add("--seq", type=_whole(2, 2**24), default=2048, help="tokens of a sequence (2048)")
    add("--vocabulary", type=_whole(1, 10**7), help=f"tokens of a preset ({GPT2_VOCABULARY})")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of computation (the device's fastest)")
    modes = ("none", "selective", "full")
    add("--checkpointing", choices=modes, help="of activations (the fastest that fits)")
    add("--host-memory", type=_number, default=float("inf"), help="GB of a node (any)")
    words = "share of the peak in percent (of public measurements)"
    add("--efficiency", type=_number, nargs=2, metavar=("LOW", "HIGH"), help=words)
    add("--peak", type=_number, help="TFLOPS of --device cpu")
    add("--memory", type=_number, help="GB of --device cpu")
    add("--bandwidth", type=_number, help="GB/s of the memory of --device cpu")
    add("--tokens", type=_count, default=0.0, help="to train on, such as 15T")
    add("--price", type=_number, help="of a device-hour, with --tokens")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print a plan; mistakes of the user are one line (exit 2)."""
    try:
        options = _parser().parse_args(arguments)
        job, setup = _job(options, _facts(options))
        tokens = options.batch * options.seq
        plan = make_plan(job, options.model, setup, tokens, options.tokens, options.price or 0.0)
    except UserError as error:
        say(f"plan: error: {error}")
        sys.exit(2)
    print(plan.model_dump_json(indent=2) if options.json else "\n".join(lines(plan)))


if __name__ == "__main__":
    main()
