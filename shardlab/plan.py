"""Plan training before anything is rented: does it fit, how fast is it, and what does it cost?

MODEL is a preset, a published model, a config.json or its folder; any other name is one on the
Hugging Face hub, which needs the extra `hf`.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.choose.plan_answer import lines, make_plan
from shardlab.config.parameters import asked_strategies
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest
from shardlab.core.link import bits_per_second
from shardlab.core.numbers import number
from shardlab.core.progress import say
from shardlab.core.types import Vocabulary
from shardlab.models.settings import GPT2_VOCABULARY, PRESETS, Model, StepSize
from shardlab.models.shapes import PUBLISHED, DecoderShapes, read_decoder
from shardlab.predict.asked import admitted, asked_candidate, unplanned
from shardlab.predict.devices import (
    DEVICES,
    Device,
    Efficiency,
    cluster_of,
    efficiency,
    inside_rate,
)
from shardlab.predict.offers import NamedStrategy
from shardlab.predict.planner import RARE_HOST, PlannedJob, Shapes
from shardlab.predict.prices import cheapest_offer
from shardlab.strategy.document import Strategy
from shardlab.train.settings import Train


class _ModelSizes(NamedTuple):
    """Sizes of a model that a plan depends on."""

    shapes: Shapes
    parameters: int
    flops_per_token: float


def _model_sizes(options: Namespace) -> _ModelSizes:
    """Read the model.

    Raises:
        UserError: it is absent, cannot be planned, or has fewer positions than the sequences.
    """
    name, length, vocabulary = options.model, options.sequence_length, options.vocabulary
    train = validate(Train, {"batch_size": options.batch_size, "sequence_length": length}, "")
    step = train.step_size(world_size=1)
    validate(Vocabulary | None, vocabulary, "vocabulary")
    decoder = read_decoder(name, vocabulary or GPT2_VOCABULARY, length)
    if vocabulary and name not in PRESETS:
        raise UserError(f"--vocabulary is for presets: {name} has its own")
    if decoder is None:
        return _of_transformers(name, step)
    if decoder.positions is not None and decoder.positions < length:
        raise UserError(
            f"--sequence-length {length}: {name} has {decoder.positions} positions: give so many "
            "or fewer"
        )
    shapes = DecoderShapes(decoder, step)
    try:
        flops = decoder.flops_per_token(length)
    except OverflowError:
        raise UserError(f"MODEL {name!r} has sizes that no number holds") from None
    return _sizes_of(name, shapes, decoder.parameters, flops)


def _of_transformers(name: str, step: StepSize) -> _ModelSizes:
    try:
        # the extra `hf`, which a plan of a known type does without
        from shardlab.models.blocks import unplanned as unplanned_blocks
        from shardlab.models.build import build_model
        from shardlab.models.sizes import ModelShapes
        from shardlab.train.utilization import flops_per_token
    except ModuleNotFoundError:
        raise UserError(
            f"MODEL {name!r}: no preset ({', '.join(PRESETS)}), no published model "
            f"({', '.join(PUBLISHED)}) and no config.json of a known type: for others "
            "pip install 'shardlab[hf]'"
        ) from None
    seq = step.sequence_length
    try:
        built = build_model(Model(config=name), 1, seq, 0, seed=0)
    except UserError as error:
        if Path(name).exists():
            # the option of this command that sets it
            message = str(error).replace("train.sequence_length:", "--sequence-length")
            raise UserError(message) from None
        raise UserError(f"{error}; {nearest(name, [*PRESETS, *PUBLISHED])}") from None
    model = built.module
    if reason := unplanned_blocks(model):
        raise UserError(f"MODEL {name!r} {reason}: not planned")
    shapes = ModelShapes(model, step, on_gpu=True)
    return _sizes_of(name, shapes, built.parameters, flops_per_token(model, seq))


def _sizes_of(name: str, shapes: Shapes, parameters: int, flops: float) -> _ModelSizes:
    if parameters <= 0:
        raise UserError(f"MODEL {name!r} has no parameters")
    return _ModelSizes(shapes, parameters, flops)


def _device(options: Namespace) -> Device:
    """Return the device of the table, or the CPU that options describe."""
    figures = (options.peak, options.memory, options.bandwidth)
    example = "--peak 0.2 --memory 32 --bandwidth 20 --efficiency 50 80"
    if options.device == "cpu":
        if None in (*figures, options.efficiency):
            raise UserError(f"--device cpu: describe it, as by {example}")
        peak, memory, bandwidth = figures
        rates = bandwidth * 1e9, bandwidth * 1e9 / 2
        return Device(memory * 1e9, {"fp32": peak * 1e12}, *rates, inside="", source="options")
    if any(value is not None for value in figures):
        raise UserError("--peak, --memory and --bandwidth are for --device cpu: remove them")
    if options.device not in DEVICES:
        # a chip without its memory, as in h100
        close = [name for name in DEVICES if name.startswith(f"{options.device}-")]
        known = ", ".join(close or [*DEVICES, "cpu"])
        raise UserError(f"--device {options.device!r}: known are {known}")
    return DEVICES[options.device]


def _check_used(options: Namespace) -> None:
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


def _inside(options: Namespace, device: Device, per_node: int) -> tuple[float, str]:
    """Return bytes per second of a device inside its node, and their name."""
    if per_node == 1:
        return float("inf"), ""
    name = options.inside or device.inside
    if not name:
        raise UserError("--nodes: several devices of a node need --inside, such as 100gbit")
    if re.fullmatch(r"[\d.]+[kmg]bit", name):
        return bits_per_second(name) / 8, name
    return inside_rate(name, device), name


def _job(options: Namespace, sizes: _ModelSizes) -> tuple[PlannedJob, str]:
    """Return what is to be predicted, and its description."""
    _check_used(options)
    device = _device(options)
    nodes, per_node = options.nodes
    dtype = options.param_dtype or next(iter(device.peaks))
    if dtype not in device.peaks:
        raise UserError(f"--param-dtype {dtype}: {options.device} has {', '.join(device.peaks)}")
    if nodes > 1 and options.link is None:
        raise UserError("--nodes: several nodes need --link, such as --link 10gbit")
    inside, name = _inside(options, device, per_node)
    bits = bits_per_second(options.link) if nodes > 1 else 1e15
    share = efficiency(options.device, dtype, sizes.parameters)
    if options.efficiency:
        low, high = sorted(options.efficiency)
        if low < 1 or high > 100:
            raise UserError(f"--efficiency {low:g} {high:g}: expected percent, from 1 to 100")
        share = Efficiency(low / 100, high / 100, "as given")
    known = options.host_memory < float("inf")
    rare = float("inf") if known else RARE_HOST * per_node * device.memory
    job = PlannedJob(
        shapes=sizes.shapes,
        parameters=sizes.parameters,
        flops=sizes.flops_per_token * options.batch_size * options.sequence_length,
        batch=options.batch_size,
        dtype=dtype,
        device=device,
        efficiency=share,
        cluster=cluster_of(device, per_node, inside, bits, options.delay_ms / 1e3),
        nodes=nodes,
        on_gpu=options.device != "cpu",
        checkpointing=options.activation_checkpointing,
        host_bytes=options.host_memory * 1e9,
        rare_host_bytes=rare,
        asked=_asked(options, dtype),
    )
    return job, _setup(options, sizes, job, name, inside)


def _asked(options: Namespace, dtype: str) -> tuple[NamedStrategy, ...]:
    """Return the strategies of the user; of all in a file those that a plan can predict."""
    nodes, per_node = options.nodes

    def reason(strategy: Strategy) -> str | None:
        return unplanned(strategy, dtype, nodes * per_node, options.batch_size)

    asked = asked_strategies(options.strategies, options.params)
    taken, left_out = admitted(asked, reason, skip="all" in options.strategies)
    for line in left_out:
        say(f"plan: {line}")
    return tuple(asked_candidate(name, strategy, dtype) for name, strategy in taken.items())


def _setup(
    options: Namespace, sizes: _ModelSizes, job: PlannedJob, name: str, inside: float
) -> str:
    (nodes, per_node), share = options.nodes, job.efficiency
    tokens = f"{options.batch_size} x {options.sequence_length} tokens per device and step"
    text = (
        f"{options.model}: {number(sizes.parameters)} parameters, "
        f"{number(sizes.flops_per_token)} FLOPs per token; {tokens}; "
        f"{nodes} x {per_node} {options.device}, {job.dtype} "
        f"at {100 * share.low:.0f} to {100 * share.high:.0f} % of its peak ({share.basis})"
    )
    if per_node > 1:
        text += f", {name} of {inside / 1e9:.0f} GB/s inside a node"
    return f"{text}, {options.link} between nodes" if nodes > 1 else text


def main(**arguments: Any) -> None:
    """Print a plan.

    Args:
        arguments: options of `shardlab plan`, see `shardlab.cli`.

    Raises:
        UserError: they fit neither each other nor the model, or nothing fits the devices.
    """
    options = Namespace(**arguments)
    job, setup = _job(options, _model_sizes(options))
    tokens = options.batch_size * options.sequence_length
    price = options.price or 0.0
    if price == "gpuhunt":
        price = cheapest_offer(options.device, options.nodes[1])
    plan = make_plan(job, options.model, setup, tokens, options.tokens, price)
    print(plan.model_dump_json(indent=2) if options.json else "\n".join(lines(plan)))
