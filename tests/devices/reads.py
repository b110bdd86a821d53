"""Prints as JSON where codecs and collectives read from the device, by case."""

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.gradiveq import GradiVeQ
from shardlab.codecs.registry import make_codec, make_method
from shardlab.codecs.unit import Block, Unit
from shardlab.comm import hierarchy
from shardlab.comm.build import Route, make_collective
from shardlab.comm.codec_collective import CodecCollective
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.strategy.codec_table import all_specs
from tests.devices.fake_device import DEVICE, no_reads, register

N = 4096
KEY = MessageKey(0, 0, "unit", 0)
CODECS = {
    name: "threshold:threshold=0.1" if name == "threshold" else name
    for name, spec in all_specs().items()
    if not spec.multi_phase
}
PHASES = [name for name, spec in all_specs().items() if spec.multi_phase]
UNIT = Unit("unit", (Block("matrix", 128, 4 * N // 128),))
CASES: tuple[tuple[Literal["fp32", "int8"] | None, str], ...] = (
    *((None, method) for method in ("reduce_scatter", "all_reduce", "all_gather")),
    ("fp32", "all_reduce"),
    ("int8", "reduce_scatter"),
)
"""residuals, each with a method that keeps them"""


def main() -> None:
    register()
    # ranks compare what they send before the first message of each kind: no read of every message
    CodecCollective._agree = lambda *_: None  # type: ignore[method-assign]
    # the fake backend has no options
    hierarchy.timeout_of = lambda group: timedelta(seconds=1)
    found = {}
    for name, text in CODECS.items():
        for call in (encode, encode_with_residual, decode):
            found[f"{name}.{call.__name__}"] = read_in(partial(call, make_codec(text)))
    for name, route in routes().items():
        for residual, method in CASES:
            case = f"{name}, {residual}.{method}"
            found[case] = read_in(partial(send, route, residual, method))
    print(json.dumps(found))


def encode(codec: Codec) -> None:
    codec.encode(floats(N), KEY, payload(codec))


def encode_with_residual(codec: Codec) -> None:
    codec.encode_residual(floats(N), floats(N), floats(N), KEY, payload(codec))


def decode(codec: Codec) -> None:
    codec.decode_sum([payload(codec), payload(codec)], floats(N), 0.5, [KEY, KEY])


def floats(n: int) -> Tensor:
    return torch.empty(n, device=DEVICE)


def payload(codec: Codec) -> Tensor:
    return torch.empty(codec.payload_bytes(N), dtype=torch.uint8, device=DEVICE)


def routes() -> dict[str, Route]:
    """All ways of a message, by name."""
    found = {"native": Route(make_method("none"), native=True)}
    inside, between = make_method("int8:group=128"), make_codec("int4:group=128")
    for name in PHASES:
        found[name] = Route(make_method(name))
    found["int8, two levels"] = Route(inside, between_nodes=between, ranks_per_node=2)
    for name, text in CODECS.items():
        found[name] = Route(make_method(text))
        if make_codec(text).linear:
            found[f"{name}, native"] = Route(make_method(text), native=True)
    return found


def send(route: Route, residual: Literal["fp32", "int8"] | None, method: str) -> None:
    """Send one message."""
    group = dist.group.WORLD
    assert group is not None
    feedback = ErrorFeedback(residual) if residual else None
    ledger = Ledger()
    made: Collective = make_collective(group, ledger, "gradients", route, feedback)
    ledger.traffic.begin_step(DEVICE)
    if isinstance(route.method, GradiVeQ):  # which finds components in one of 50 steps, by reads
        components = floats(256 * 32).view(256, 32)
        made.load_state_dict({"step/unit": torch.tensor(1), "method/unit": components})
    vector, shard, unit = floats(4 * N), floats(N), UNIT
    if method == "reduce_scatter":
        made.reduce_scatter(shard, vector, 0.25, unit)
    elif method == "all_reduce":
        made.all_reduce(vector, 0.25, unit)
    else:
        made.all_gather(vector, shard, unit)
    ledger.traffic.end_step(lambda seconds: None)


def read_in(call: Callable[[], None]) -> str:
    """Return the error of the read in a call, and its place; empty where there is none."""
    try:
        with no_reads():
            call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if "/shardlab/" in each.filename][-1]
        place = own.filename.rpartition("/shardlab/")[2]
        return f"{place}:{own.lineno}: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
