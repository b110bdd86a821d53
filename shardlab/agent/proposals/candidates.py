"""Candidates: single-setting changes of the incumbent (actions), or whole strategies.

These are drafts: plain documents that the validator still has to accept. Both lists are pure
functions of the history, so that a repeated proposal offers the same.
"""

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any, Literal

from shardlab.agent.proposals.changes import Change, in_words
from shardlab.agent.proposals.seeds import (
    BUCKETS_MB,
    CODECS,
    ENGINES_TRIED,
    MINIMUM_SIZES,
    WEIGHT_CODECS,
    default,
    heuristic,
    random_strategies,
)
from shardlab.agent.records.history import History
from shardlab.core.document import Document
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.engine_traits import ENGINES, accepts_codec, inapplicable
from shardlab.strategy.strategy import Strategy

_NEIGHBOURHOODS = 3
"""number of fastest strategies whose neighbours config mode considers"""
_DRAWS = 16
_KEPT = ("minimum_size", "exclude", "warmup_steps", "between_nodes", "ranks_per_node")
"""settings of gradients that survive a change of their codec"""

_AHEAD = ("prefetch", "prefetch_backward", "async_unshard")
_OF_UNITS = ("wrap_size", "reshard_after_forward", "overrides", *_AHEAD)
"""settings whose meaning depends on how units are wrapped"""


class Draft(Document):
    """A strategy as plain data, possibly invalid, and its origin."""

    document: dict[str, Any]
    why: str


def draft_candidates(
    mode: Literal["action", "config"],
    history: History,
    named: dict[str, Strategy],
    memory_limit_bytes: int,
) -> list[Draft]:
    """Return drafts in the order in which they should be considered.

    Args:
        mode: `action`: one setting of the incumbent changed; `config`: whole strategies.
        named: strategies of the user that are not in the matrix (config mode).
        memory_limit_bytes: what one rank may use, for the rules of thumb (config mode).
    """
    if mode == "action":
        return actions(history.incumbent.strategy)
    return _whole_strategies(history, named, memory_limit_bytes)


def actions(strategy: Strategy) -> list[Draft]:
    """Return every change of one setting; kinds of change alternate, so that a cap keeps some of
    each.

    Each can be undone by another action. Settings that only had a meaning with the old value
    (a bucket size under `ddp`, the codec of gathered weights under `fsdp2`, the prefetch of the old
    units, the route of the old codec) go back to their defaults.
    """
    form = strategy.canonical().model_dump(mode="json", exclude_none=True)
    kinds = [
        _wraps(form),
        _ahead(strategy, form),
        _codecs(strategy, form),
        _weights(strategy, form),
        _engines(form),
        _messages(form),
    ]
    turns = chain.from_iterable(zip_longest(*kinds))
    return [draft for draft in turns if draft is not None]


def _wraps(form: dict[str, Any]) -> Iterator[Draft]:
    if "bucket_mb" in form:
        for size in BUCKETS_MB:
            if size != form["bucket_mb"]:
                yield _change(form, "bucket_mb", form["bucket_mb"], size)
        return
    if form["wrap"] != "root" and "reshard_after_forward" in form:
        freed = bool(form["reshard_after_forward"])
        yield _change(form, "reshard_after_forward", freed, not freed)
    other = "root" if form["wrap"] == "block" else "block"
    yield _change(form, "wrap", form["wrap"], other, without=_OF_UNITS)


def _ahead(strategy: Strategy, form: dict[str, Any]) -> Iterator[Draft]:
    """Return changes of prefetch, where there are several units to gather."""
    overlaps = ENGINES[strategy.engine].overlap != "streams"  # else prefetch does nothing on a CPU
    if overlaps and "reshard_after_forward" in form:
        units = strategy.depths()[0]
        if form["wrap"] != "root":
            yield _change(form, "prefetch", units, int(not units), without=("prefetch_backward",))


def _codecs(strategy: Strategy, form: dict[str, Any]) -> Iterator[Draft]:
    now = codec_text(strategy.gradients.codec)
    rest = {}
    if not strategy.gradients.plain():
        rest = {key: form["gradients"][key] for key in _KEPT if key in form["gradients"]}
    for text, feedback in CODECS:
        if text != now and accepts_codec(strategy.engine, text.partition(":")[0]):
            gradients = {**rest, "codec": text, "error_feedback": feedback}
            yield _action({**form, "gradients": gradients}, Change("codec", now, text))


def _weights(strategy: Strategy, form: dict[str, Any]) -> Iterator[Draft]:
    if "reshard_after_forward" not in form:  # no parameters are gathered
        return
    now = codec_text(strategy.weights.codec) if strategy.weights else "none"
    for text in WEIGHT_CODECS:
        if text != now:
            yield _action({**form, "weights": {"codec": text}}, Change("weights", now, text))


def _engines(form: dict[str, Any]) -> Iterator[Draft]:
    now = form["engine"]
    for other in ENGINES_TRIED:
        if other != now and accepts_codec(other, form["gradients"]["codec"]["name"]):
            without = (*inapplicable(other), *_AHEAD, "overrides")
            yield _change(form, "engine", now, other, without)


def _messages(form: dict[str, Any]) -> Iterator[Draft]:
    gradients = form["gradients"]

    def change(key: str, after: Any, without: tuple[str, ...] = ()) -> Draft:
        rest = {name: value for name, value in gradients.items() if name not in without}
        document = {**form, "gradients": {**rest, key: after}}
        return _action(document, Change(key, gradients[key], after))

    if gradients["codec"]["name"] == "none":
        yield change("route", "exchange" if gradients["route"] == "native" else "native")
        return
    yield change("error_feedback", not gradients["error_feedback"], without=("residual",))
    for size in MINIMUM_SIZES:
        if size != gradients["minimum_size"]:
            yield change("minimum_size", size)


def _change(
    form: dict[str, Any], key: str, before: Any, after: Any, without: tuple[str, ...] = ()
) -> Draft:
    rest = {name: value for name, value in form.items() if name not in without}
    return _action({**rest, key: after}, Change(key, before, after))


def _action(document: dict[str, Any], change: Change) -> Draft:
    return Draft(document=document, why=f"action: {in_words((change,))}")


def _whole_strategies(
    history: History, named: dict[str, Strategy], memory_limit_bytes: int
) -> list[Draft]:
    first = [_draft(strategy, f"strategies.{name}") for name, strategy in named.items()]
    first.append(_draft(default(), "the default strategy"))
    first.append(_draft(heuristic(history, memory_limit_bytes), "rules of thumb"))
    # a new round draws new random strategies; a repeated round draws the same
    seed = len(history.rounds)
    drawn = [
        _draft(strategy, f"drawn at random, seed {seed}")
        for strategy in random_strategies(seed, _DRAWS)
    ]
    turns = chain.from_iterable(zip_longest(*_neighbours(history), drawn))
    return first + [draft for draft in turns if draft is not None]


def _neighbours(history: History) -> list[list[Draft]]:
    """Return the actions on each of the fastest strategies."""
    fastest = sorted(history.succeeded(), key=lambda entry: (entry.mean("step_ms_p50"), entry.hash))
    return [
        [
            Draft(document=draft.document, why=f"near {entry.source}: {draft.why}")
            for draft in actions(entry.strategy)
        ]
        for entry in fastest[:_NEIGHBOURHOODS]
    ]


def _draft(strategy: Strategy, why: str) -> Draft:
    return Draft(document=strategy.canonical().model_dump(mode="json", exclude_none=True), why=why)
