"""Initial strategies: the default, one by rules of thumb, and random ones."""

import random
from typing import Any

from shardlab.agent.proposals.evidence import estimate_peak
from shardlab.agent.records.history import History
from shardlab.strategy.engine_traits import ENGINES, EngineName
from shardlab.strategy.strategy import Strategy, parse_strategy

CODECS: tuple[tuple[str, bool], ...] = (
    ("none", False),
    ("bf16", False),
    ("int8:group=128", False),
    ("int4:group=128", True),
    ("topk:density=0.05", True),
    ("fp8:format=e4m3", False),
    ("efsign:group=512", True),
    ("powersgd:rank=4", True),
    ("onebit:group=512", True),
    ("topk:density=0.01", True),
)
"""codec and whether it takes error feedback, without which coarse ones lose most of a gradient"""
ENGINES_TRIED: tuple[EngineName, ...] = ("fsdp2", "manual", "ddp")
WEIGHT_CODECS = ("none", "int8:group=128")
"""codecs of gathered parameters"""
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
MINIMUM_SIZES = (0, 1024, 16384)

EXPOSED_WORTH = 0.05
"""exposed communication as a share of the step that is worth an action (TraceLens flags it there)
"""


def default() -> Strategy:
    """Return the strategy with every setting at its default."""
    return Strategy()


def heuristic(history: History, memory_limit_bytes: int) -> Strategy:
    """Return a strategy by rules of thumb: shard as far as memory requires, compress only exposed
    communication.

    The first of `ddp`, `fsdp2` that keeps parameters after forward, and `fsdp2` whose estimated
    peak is within the limit; bf16 when the incumbent waits for communication.
    """
    incumbent = history.incumbent
    share = incumbent.mean("exposed_comm_ms") / incumbent.mean("profiled_step_ms")
    gradients = {"codec": "bf16" if share >= EXPOSED_WORTH else "none"}
    shardings: tuple[dict[str, Any], ...] = (
        {"engine": "ddp"},
        {"engine": "fsdp2", "reshard_after_forward": False},
        {"engine": "fsdp2"},
    )
    strategies = [parse_strategy({**each, "gradients": gradients}) for each in shardings]
    for strategy in strategies:
        if estimate_peak(strategy, incumbent, history.workload) <= memory_limit_bytes:
            return strategy
    return strategies[-1]


def random_strategies(seed: int, count: int) -> list[Strategy]:
    """Draw `count` independent strategies, the same ones for the same seed."""
    generator = random.Random(seed)
    return [_draw(generator) for _ in range(count)]


def _draw(generator: random.Random) -> Strategy:
    codec, feedback = generator.choice(CODECS)
    engine: EngineName = generator.choice(("ddp", "fsdp2"))
    document: dict[str, Any] = {"engine": engine}
    if "bucket_mb" in ENGINES[engine].settings:
        document["bucket_mb"] = generator.choice(BUCKETS_MB)
    else:
        document["wrap"] = generator.choice(("block", "root"))
        if document["wrap"] == "block":
            document["reshard_after_forward"] = generator.choice((True, False))
        document["weights"] = {"codec": generator.choice(WEIGHT_CODECS)}
    document["gradients"] = {"codec": codec, "error_feedback": feedback}
    if codec == "none":
        document["gradients"]["route"] = generator.choice(("native", "exchange"))
    else:
        document["gradients"]["minimum_size"] = generator.choice(MINIMUM_SIZES)
    return parse_strategy(document)
