"""Plan: strategies with predicted steps, ranked by the rule that chooses, and its text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import TextWrapper

from shardlab.choose.rank import Option, Ranking, rank
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.numbers import number, rough
from shardlab.predict.planner import USABLE, Outcome, PlannedJob, fits_on, outcomes
from shardlab.predict.prices import Offer
from shardlab.results.interval import Ratio

_TEXT = TextWrapper(width=100, break_on_hyphens=False)
_DAY = 86_400
_NAME = 27
"""Width of a name in the table, in characters."""
_MOST_NODES = 4096
_LEGEND = (
    "device GB: states+activations+window; checkp.: checkpointing /micro-batches; even: reaches "
    "the same loss sooner where it needs fewer than so many times as many tokens; %: computation "
    "in the step; link: Gbit/s of a node where that is 50/75/90 %; *: changes training, and is in "
    "no ranking"
)
_TRIED = (
    "Validated: 2 CPU ranks on emulated links, and public GPU runs without codecs on fast links. "
    "Not validated: our engines and codecs on GPUs, slow real networks. docs/how-to/plan.md has "
    "the errors and what is assumed."
)


class Cost(Document):
    """Duration and price of training with one strategy, at the ends of its predicted step."""

    strategy: str
    devices: int
    attach: str | None
    """Lines for a script, where the strategy needs them."""
    tokens_per_day: tuple[float, float]
    hours: tuple[float, float] | None
    price: tuple[float, float] | None


class Plan(Document):
    """Content of a plan."""

    answer: str
    """Answer in one sentence."""
    model: str
    parameters: int
    flops_per_token: float
    setup: str
    strategies: list[Outcome]
    """Strategies on all devices."""
    one_node: Outcome | None
    """Best strategy without loss on one node; null: none fits, or the cluster has one node."""
    one_device: Outcome | None
    """Best strategy without loss on one device; null: none fits, or the cluster has one device."""
    best: list[Cost]
    """Cost of the best strategy without loss, then of the best that changes training, where its
    break-even is above the margin of the rule."""
    break_even: dict[str, float]
    """How many times as many tokens to a loss a strategy that changes training may need and still
    reach it as soon as the best without loss; by strategy."""
    offer: Offer | None = None
    """Offer that gave the price; null: the user gave it."""


def make_plan(
    job: PlannedJob, model: str, setup: str, tokens: int, goal: float, price: float | Offer
) -> Plan:
    """Predict all strategies and rank them.

    Args:
        model, setup: descriptions of the model and of the assumptions.
        tokens: tokens of a device in a step.
        goal: tokens to train on; 0: no goal.
        price: price of a device-hour, or an offer with one; 0: unknown.

    Raises:
        UserError: no strategy without loss fits.
    """
    planned = outcomes(job, tokens)
    if not any(outcome.fits for outcome in planned if not outcome.lossy):
        raise UserError(_what_fits(job, planned, model))
    per_node, single, several = job.cluster.ranks_per_node, [], _usable(planned)
    if job.nodes > 1 and per_node > 1:
        single += _usable(outcomes(job.alone(per_node), tokens, lossy=False))
    if job.world_size > 1:
        single += _usable(outcomes(job.alone(1), tokens, lossy=False))
    else:
        single, several = several, []
    by_name = {_title(outcome): outcome for outcome in (*several, *single)}
    ranking = rank(
        [_option(outcome, planned) for outcome in several],
        [_option(outcome, planned) for outcome in single],
        tolerance=0.0,
    )
    order = [by_name[str(ranked.option.name)] for ranked in ranking.order]
    one_node, one_device = (
        next((o for o in order if o.devices == devices), None) if devices < job.world_size else None
        for devices in (per_node if job.nodes > 1 and per_node > 1 else job.world_size, 1)
    )
    lossless = next(outcome for outcome in order if outcome.devices == job.world_size)
    even = {by_name[title].name: ratio for title, ratio in ranking.break_even.items()}
    chosen = [order[0], *(by_name[title] for title in ranking.gaining[:1])]
    offer = price if isinstance(price, Offer) else None
    per_hour = price.price if isinstance(price, Offer) else price
    return Plan(
        answer=_answer(chosen, lossless, [o for o in (one_node, one_device) if o], ranking, even),
        model=model,
        parameters=job.parameters,
        flops_per_token=job.flops / tokens,
        setup=setup,
        strategies=planned,
        one_node=one_node,
        one_device=one_device,
        best=[_cost(outcome, goal, per_hour) for outcome in chosen],
        break_even=even,
        offer=offer,
    )


def _speed(outcome: Outcome) -> float:
    return outcome.tokens_per_s.middle


def _title(outcome: Outcome) -> str:
    return f"{outcome.name} on {outcome.devices}"


def _usable(predicted: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that fit. Those with states in host memory are included only where no
    other outcome without loss fits, since the host memory of a node is often unknown."""
    fitting = [outcome for outcome in predicted if outcome.fits]
    without_host = [outcome for outcome in fitting if not outcome.host]
    return without_host if any(not outcome.lossy for outcome in without_host) else fitting


def _option(outcome: Outcome, planned: Sequence[Outcome]) -> Option:
    """Return an outcome as an option with its time per token. The time has no interval, since all
    strategies share the assumptions on devices and links."""
    names = [outcome.name for outcome in planned]
    return Option(
        _title(outcome),
        Ratio(1 / _speed(outcome), math.nan, math.nan),
        devices=outcome.devices,
        measured=False,
        lossless=not outcome.lossy,
        # the order of the plan: strategies that change training least come first
        simplicity=names.index(outcome.name) if outcome.name in names else 0,
    )


def _what_fits(job: PlannedJob, predicted: Iterable[Outcome], model: str) -> str:
    """Return the message that no strategy fits, with the options to try next."""
    smallest = min(predicted, key=lambda outcome: outcome.device_bytes)
    available, per_node = USABLE * job.device.memory, job.cluster.ranks_per_node
    message = (
        f"{model} fits on no strategy: {smallest.name} needs {smallest.device_bytes / 1e9:.3g} GB "
        f"of {available / 1e9:.3g} GB of a device and {smallest.host / 1e9:,.0f} GB of a node's "
        "host"
    )
    if smallest.host > job.host_bytes:
        message += f", which has {job.host_bytes / 1e9:,.0f}"
    nodes = 2 * job.nodes
    while nodes <= _MOST_NODES:
        if fits_on(job._replace(nodes=nodes)):
            link = " --link 100gbit" if job.nodes == 1 else ""
            return f"{message}: try --nodes {nodes}x{per_node}{link}"
        nodes *= 2
    fits_device = smallest.device_bytes <= available
    smaller = "raise --host-memory" if fits_device else "halve --sequence-length"
    return f"{message}: more nodes do not help: {smaller}, or take a larger device"


def _where(outcome: Outcome) -> str:
    return "one device" if outcome.devices == 1 else "one node"


def _answer(
    chosen: Sequence[Outcome],
    lossless: Outcome,
    single: Sequence[Outcome],
    ranking: Ranking,
    break_even: Mapping[str, float],
) -> str:
    best, lossy = chosen[0], chosen[1:]
    where = "" if best is lossless else f" on {_where(best)} alone"
    text = f"Use {best.name}{where}: {_seconds(best)}, {100 * best.utilisation:.0f} % of it "
    text += "computing"
    if where:
        ratio = _speed(lossless) / _speed(best)
        text += (
            f"; all {lossless.devices} devices, without changing training, reach {rough(ratio)} x "
            "its tokens/s"
        )
    else:
        for outcome in single:
            text += f", {rough(_speed(best) / _speed(outcome))} x {_where(outcome)} alone"
    assert ranking.first is not None, "a strategy without loss fits"
    if tied := ranking.same_as(ranking.first):
        text += f"; not told apart from it: {', '.join(str(option.name) for option in tied)}"
    if not lossy:
        return f"{text}; nothing that changes training is faster."
    return (
        f"{text}; {lossy[0].name}, which changes training, reaches the same loss sooner if "
        f"it needs fewer than {rough(break_even[lossy[0].name])} x as many tokens."
    )


def _cost(best: Outcome, goal: float, price: float) -> Cost:
    slow, fast = best.tokens_per_s.low, best.tokens_per_s.high
    hours = (goal / fast / 3600, goal / slow / 3600) if goal else None
    per_hour = best.devices * price
    return Cost(
        strategy=best.name,
        devices=best.devices,
        attach=best.attach,
        tokens_per_day=(slow * _DAY, fast * _DAY),
        hours=hours,
        price=(hours[0] * per_hour, hours[1] * per_hour) if hours and price else None,
    )


def _seconds(outcome: Outcome) -> str:
    step = outcome.step_s
    text = f"{step.middle:.3g} s ({step.low:.3g} to {step.high:.3g}) per step"
    rare = " (rare)" * outcome.host_rare
    return text + (f", {outcome.host / 1e9:.0f} GB of host memory{rare}" if outcome.host else "")


def _between(ends: tuple[float, float]) -> str:
    return f"{number(ends[0])} to {number(ends[1])}"


def _bought(offer: Offer) -> str:
    date = "-".join((offer.catalogue[:4], offer.catalogue[4:6], offer.catalogue[6:8]))
    return (
        f"price: {offer.price:.3g} USD per device-hour on demand, {offer.instance} of "
        f"{offer.provider} in {offer.region}: the cheapest in gpuhunt's catalogue of {date}, of "
        f"{offer.providers} providers"
    )


def _row(outcome: Outcome, scale: float, break_even: float | None) -> str:
    """Return a line of the table: memory in GB, rates in Gbit/s, times in seconds by `scale`."""
    parts = "+".join(
        f"{n / 1e9:.0f}" for n in (outcome.states, outcome.activations, outcome.window)
    )
    mode = {"selective": "sel."}.get(outcome.checkpointing, outcome.checkpointing)
    mode += f" /{outcome.micro_batches}" if outcome.micro_batches > 1 else ""
    name = outcome.name + "*" * outcome.lossy
    # a name that is too long for its column gets a separate line
    title = f"{name:{_NAME}}" if len(name) <= _NAME else f"{name}\n{'':{_NAME}}"
    row = f"{title} {parts:>10} {outcome.host / 1e9:4.0f} {mode:8}"
    if not outcome.fits:
        return f"{row} does not fit"
    middle, low, high = (
        scale * s for s in (outcome.step_s.middle, outcome.step_s.low, outcome.step_s.high)
    )
    rates = "/".join("-" if r is None else rough(r / 1e9) for r in outcome.link_rates.values())
    ends = rough(low), rough(high)
    # ends that are equal after rounding add nothing to the middle
    step = f"{middle:.3g}" + f" ({'-'.join(ends)})" * (ends[0] != ends[1])
    even = "" if break_even is None else rough(break_even)
    return f"{row} {step:>18} {even:>6} {100 * outcome.utilisation:3.0f} {rates}".rstrip()


def lines(plan: Plan) -> list[str]:
    """Return a plan as lines for a terminal."""
    quick = all(outcome.step_s.middle < 1 for outcome in plan.strategies if outcome.fits)
    scale, unit = (1e3, "ms") if quick else (1.0, "s")
    step = f"step, {unit}"
    text_lines = [
        *_TEXT.wrap(plan.answer),
        "",
        *_TEXT.wrap(plan.setup),
        "",
        f"{'':{_NAME}} {'device GB':>10} host checkp.  {step:>18}   even   % link",
        *(_row(outcome, scale, plan.break_even.get(outcome.name)) for outcome in plan.strategies),
        *_TEXT.wrap(_LEGEND),
    ]
    for outcome in (plan.one_node, plan.one_device):
        if outcome is not None:
            text_lines.append(f"{_where(outcome)} alone: {outcome.name}, {_seconds(outcome)}")
    for cost in plan.best:
        text = f"{cost.strategy} on {cost.devices}: {_between(cost.tokens_per_day)} tokens per day"
        if cost.hours:
            text += f", {_between(cost.hours)} hours"
        if cost.price:
            text += f", price {_between(cost.price)}"
        text_lines += _TEXT.wrap(text)
        text_lines += [f"  {line}" for line in (cost.attach or "").splitlines()]
    if plan.offer is not None:
        text_lines += _TEXT.wrap(_bought(plan.offer))
    return [*text_lines, *_TEXT.wrap(_TRIED)]
