"""Strategies of a user among those that a plan compares."""

from shardlab.core.errors import UserError
from shardlab.predict.offers import Candidate
from shardlab.predict.planner import CODE_BYTES
from shardlab.predict.step import unsupported
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.document import CanonicalStrategy, Strategy
from shardlab.strategy.validation import check_fits


def asked_candidate(
    name: str, strategy: Strategy, dtype: str, world_size: int, samples: int
) -> Candidate:
    """Return a strategy as a candidate of a plan, which chooses what the document leaves open.

    Args:
        dtype: in which the plan computes.
        samples: sequences that a device sees in a step.

    Raises:
        UserError: no plan can predict it, or so many devices cannot train by it.
    """
    try:
        if reason := unplanned(strategy, dtype):
            raise UserError(reason)
        check_fits(strategy, world_size, samples)
    except UserError as error:
        raise UserError(f"--strategy {name}: {error}") from None
    document = strategy.model_dump(mode="json", exclude_unset=True)
    lossy = changes_training(strategy.canonical())
    return Candidate(f"your {name}", {**document, "param_dtype": dtype}, lossy)


def changes_training(strategy: CanonicalStrategy) -> bool:
    """Return whether updates differ from those by gradients that are reduced in float32 in every
    step."""
    rounded = {strategy.reduce_dtype, strategy.moment_dtype} != {"fp32"}
    coded = bool(strategy.weights) or not strategy.gradients.plain()
    return rounded or coded or strategy.sync is not None


def unplanned(strategy: Strategy, dtype: str) -> str | None:
    """Return why a plan that computes in `dtype` cannot predict a strategy, with what it can; None
    where it can."""
    full = strategy.canonical()
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
                "take one of them, or measure yours by shardlab probe --strategy"
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
