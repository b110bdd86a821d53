"""Strategies of a user among those that a plan or a probe compares."""

from collections.abc import Callable, Mapping

from shardlab.core.errors import UserError
from shardlab.predict.offers import NamedStrategy
from shardlab.predict.planner import CODE_BYTES
from shardlab.predict.step import unsupported
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.compression import Compression
from shardlab.strategy.document import CanonicalStrategy, Strategy
from shardlab.strategy.validation import check_fits


def admitted(
    strategies: Mapping[str, Strategy], reason_of: Callable[[Strategy], str | None], skip: bool
) -> tuple[dict[str, Strategy], list[str]]:
    """Return the strategies that a command can take, by the names of their rows, and a line for
    each that it leaves out.

    Args:
        reason_of: returns why it cannot take one.
        skip: whether to leave it out, in place of an error.

    Raises:
        UserError: it cannot take one.
    """
    taken, lines = {}, []
    for name, strategy in strategies.items():
        reason = reason_of(strategy)
        if reason is None:
            taken[f"your {name}"] = strategy
        elif skip:
            lines.append(f"without {name}: {reason}")
        else:
            raise UserError(f"--strategy {name}: {reason}")
    return taken, lines


def asked_candidate(name: str, strategy: Strategy, dtype: str) -> NamedStrategy:
    """Return a strategy as a candidate of a plan, which chooses what the document leaves open.

    Args:
        dtype: in which the plan computes.
    """
    document = strategy.model_dump(mode="json", exclude_unset=True)
    lossy = changes_training(strategy.canonical())
    return NamedStrategy(name, {**document, "param_dtype": dtype}, lossy)


def changes_training(strategy: CanonicalStrategy) -> bool:
    """Return whether updates differ from those by gradients that are reduced in float32 in every
    step."""
    rounded = {strategy.reduce_dtype, strategy.moment_dtype} != {"fp32"}
    coded = bool(strategy.weights) or not strategy.gradients.plain()
    return rounded or coded or strategy.sync is not None


def unplanned(strategy: Strategy, dtype: str, world_size: int, samples: int) -> str | None:
    """Return why a plan cannot predict a strategy, with what it can; None where it can.

    Args:
        dtype: in which the plan computes.
        samples: sequences that a device sees in a step.
    """
    full = strategy.canonical()
    try:
        check_fits(full, world_size, samples)
    except UserError as error:
        return str(error)
    if full.param_dtype not in ("auto", dtype):
        return (
            f"param_dtype is {full.param_dtype}, and the plan computes in {dtype}: remove it, or "
            f"give --param-dtype {full.param_dtype}"
        )
    if full.overrides:
        return "a plan has one setting for all layers: remove overrides"
    if full.wrap not in (None, "block") or full.wrap_size is not None:
        return "the units of a plan are single blocks: remove wrap and wrap_size"
    for codec in codecs_of(full):
        if codec.name not in CODE_BYTES:
            return (
                f"a plan knows what {', '.join(CODE_BYTES)} cost, and not {codec.name}: "
                "take one of them, or measure yours by shardlab timing"
            )
    if setting := unsupported(full):
        return f"a plan knows nothing of {setting}: remove it, or measure it by shardlab timing"
    return None


def codecs_of(strategy: CanonicalStrategy) -> list[CodecSpec]:
    """Return the codecs of all messages of a strategy."""
    gradients, weights, sync = strategy.gradients, strategy.weights, strategy.sync
    codecs = [gradients.codec, gradients.between_nodes]
    codecs += [part.codec for part in (weights, sync) if part is not None]
    return [codec for codec in codecs if codec is not None and codec.name != "none"]


def unprobed(strategy: Strategy, world_size: int, nodes: int) -> str | None:
    """Return why a probe cannot measure a strategy, with what it can; None where it can, since each
    rank, or each node, is a replica."""
    full = strategy.canonical()
    replicas, codec = full.copies(world_size), sent_by_replicas(full).codec
    if replicas not in (world_size, nodes) or replicas == 1:
        hybrid = f", or sharding: hybrid_shard with replicas: {nodes}"
        return (
            "a probe measures what replicas send: take engine: ddp"
            f"{hybrid if 1 < nodes < world_size else ''}; shardlab timing measures others"
        )
    if codec.needs_matrices:
        return f"a probe sends a vector, without matrices for {codec.name}: use shardlab timing"
    return None


def sent_by_replicas(strategy: CanonicalStrategy) -> Compression:
    """Return the compression of what replicas send after any warm-up: gradients, or in their place
    those of the outer optimizer."""
    sync = strategy.sync
    if sync is None:
        return strategy.gradients.model_copy(update={"warmup_steps": 0})
    return Compression(codec=sync.codec, error_feedback=sync.error_feedback, decay=sync.decay)
