"""Choice among predicted strategies, and a plan as text for a terminal."""

from collections.abc import Iterable, Sequence
from textwrap import TextWrapper

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.numbers import number, rough
from shardlab.predict.planner import USABLE, Job, Outcome, fits_on, outcomes

_TEXT = TextWrapper(width=100, break_on_hyphens=False)
_DAY = 86_400
_GAIN = 1.1
"""speed of what changes training over the best that does not, from which on it is named"""
_ENOUGH = 0.95
"""share of the highest speed that is enough to be named, for what changes training less"""
_MOST_NODES = 4096
_TRIED = (
    "Validated: 2 CPU ranks on emulated links, and public GPU runs without codecs on fast links. "
    "Not validated: our engines and codecs on GPUs, slow real networks. docs/how-to/plan.md has "
    "the errors and what is assumed."
)


class Cost(Document):
    """Duration and price of a number of tokens with one strategy, from its fastest to its slowest
    step."""

    strategy: str
    devices: int
    attach: str | None
    """line for a script, where the strategy needs one"""
    tokens_per_day: tuple[float, float]
    hours: tuple[float, float] | None
    price: tuple[float, float] | None


class Plan(Document):
    """Everything that a plan says."""

    answer: str
    """in one sentence"""
    model: str
    parameters: int
    flops_per_token: float
    setup: str
    strategies: list[Outcome]
    """on all devices"""
    one_node: Outcome | None
    """fastest without loss on one node alone; null: nothing fits, or there is one node"""
    one_device: Outcome | None
    """likewise on one device"""
    best: list[Cost]
    """fastest without loss, on fewer devices where more are not faster; then the first that changes
    training and is about as fast as the fastest of all, where that is faster"""


def _speed(outcome: Outcome) -> float:
    return outcome.tokens_per_s.middle


def _fastest(predicted: Iterable[Outcome]) -> Outcome | None:
    """Return the fastest that fits, with states in host memory only where no other does."""
    fitting = (each for each in predicted if each.fits)
    return max(fitting, key=lambda each: (not each.host, _speed(each)), default=None)


def make_plan(job: Job, model: str, setup: str, tokens: int, goal: float, price: float) -> Plan:
    """Predict all strategies and choose among them.

    Args:
        model, setup: in words.
        tokens: of a device in a step.
        goal: tokens to train on; 0: none.
        price: of a device-hour; 0: unknown.

    Raises:
        UserError: nothing fits.
    """
    found = outcomes(job, tokens)
    lossless, fastest = _fastest(each for each in found if not each.lossy), _fastest(found)
    if lossless is None or fastest is None:
        raise UserError(_what_fits(job, found, model))
    per_node, one_node, one_device = job.cluster.ranks_per_node, None, None
    if job.nodes > 1 and per_node > 1:
        one_node = _fastest(outcomes(job.alone(per_node), tokens, lossy=False))
    if job.world_size > 1:
        one_device = _fastest(outcomes(job.alone(1), tokens, lossy=False))
    alone = [each for each in (one_node, one_device) if each is not None]
    # fewer devices where more are not faster
    best = max((*alone[::-1], lossless), key=_speed)
    # those that change training least come first
    enough = [each for each in found if each.fits and _speed(each) >= _ENOUGH * _speed(fastest)]
    milder = next((each for each in enough if each.lossy), fastest)
    chosen = [best] if _speed(milder) < _GAIN * _speed(best) else [best, milder]
    return Plan(
        answer=_answer(chosen, lossless, alone),
        model=model,
        parameters=job.parameters,
        flops_per_token=job.flops / tokens,
        setup=setup,
        strategies=found,
        one_node=one_node,
        one_device=one_device,
        best=[_cost(each, goal, price) for each in chosen],
    )


def _what_fits(job: Job, found: Iterable[Outcome], model: str) -> str:
    """Return that nothing fits, and what to type next."""
    least = min(found, key=lambda each: each.device_bytes)
    have, per_node = USABLE * job.device.memory, job.cluster.ranks_per_node
    wrong = (
        f"{model} fits on no strategy: {least.name} needs {least.device_bytes / 1e9:.3g} GB of "
        f"{have / 1e9:.3g} GB of a device and {least.host / 1e9:,.0f} GB of a node's host"
    )
    if least.host > job.host_bytes:
        wrong += f", which has {job.host_bytes / 1e9:,.0f}"
    nodes = 2 * job.nodes
    while nodes <= _MOST_NODES:
        if fits_on(job._replace(nodes=nodes)):
            link = " --link 100gbit" if job.nodes == 1 else ""
            return f"{wrong}: try --nodes {nodes}x{per_node}{link}"
        nodes *= 2
    smaller = "raise --host-memory" if least.device_bytes <= have else "halve --sequence-length"
    return f"{wrong}: more nodes do not help: {smaller}, or take a larger device"


def _where(outcome: Outcome) -> str:
    return "one device" if outcome.devices == 1 else "one node"


def _answer(chosen: Sequence[Outcome], lossless: Outcome, alone: Sequence[Outcome]) -> str:
    best, others = chosen[0], chosen[1:]
    where = "" if best is lossless else f" on {_where(best)} alone"
    text = f"Use {best.name}{where}: {_seconds(best)}, {100 * best.utilisation:.0f} % of it "
    text += "computing"
    if where:
        ratio = _speed(lossless) / _speed(best)
        text += f"; all {lossless.devices} devices without loss reach {rough(ratio)} x its tokens/s"
    else:
        gains = (f", {rough(_speed(best) / _speed(each))} x {_where(each)} alone" for each in alone)
        text += "".join(gains)
    if not others:
        return f"{text}; nothing that changes training is faster."
    gain = _speed(others[0]) / _speed(best)
    return f"{text}; {others[0].name}, which changes training, is {rough(gain)} x as fast."


def _cost(best: Outcome, goal: float, price: float) -> Cost:
    slow, fast = best.tokens_per_s.low, best.tokens_per_s.high
    hours = (goal / fast / 3600, goal / slow / 3600) if goal else None
    of_hour = best.devices * price
    return Cost(
        strategy=best.name,
        devices=best.devices,
        attach=best.attach,
        tokens_per_day=(slow * _DAY, fast * _DAY),
        hours=hours,
        price=(hours[0] * of_hour, hours[1] * of_hour) if hours and price else None,
    )


def _seconds(outcome: Outcome) -> str:
    step = outcome.step_s
    text = f"{step.middle:.3g} s ({step.low:.3g} to {step.high:.3g}) per step"
    rare = " (rare)" * outcome.host_rare
    return text + (f", {outcome.host / 1e9:.0f} GB of host memory{rare}" if outcome.host else "")


def _between(ends: tuple[float, float]) -> str:
    return f"{number(ends[0])} to {number(ends[1])}"


def _row(each: Outcome, scale: float) -> str:
    """Return a line of the table: bytes in GB, rates in Gbit/s, times `scale` times the seconds."""
    parts = "+".join(f"{n / 1e9:.0f}" for n in (each.states, each.activations, each.window))
    mode = {"selective": "sel."}.get(each.checkpointing, each.checkpointing)
    mode += f" /{each.micro_batches}" if each.micro_batches > 1 else ""
    row = f"{each.name + '*' * each.lossy:27} {parts:>10} {each.host / 1e9:4.0f} {mode:8}"
    if not each.fits:
        return f"{row} does not fit"
    middle, low, high = (scale * s for s in (each.step_s.middle, each.step_s.low, each.step_s.high))
    rates = "/".join("-" if r is None else rough(r / 1e9) for r in each.link_rates.values())
    step, exposed = (
        f"{middle:.3g} ({rough(low)}-{rough(high)})",
        rough(scale * each.exposed_s),
    )
    return f"{row} {step:>18} {exposed:>6} {100 * each.utilisation:3.0f} {rates}".rstrip()


def lines(plan: Plan) -> list[str]:
    """Return a plan as lines for a terminal."""
    quick = all(each.step_s.middle < 1 for each in plan.strategies if each.fits)
    scale, unit = (1e3, "ms") if quick else (1.0, "s")
    step = f"step, {unit}"
    found = [
        *_TEXT.wrap(plan.answer),
        "",
        *_TEXT.wrap(plan.setup),
        "",
        f"{'':27} {'device GB':>10} host checkp.  {step:>18} expos.   % link",
        *(_row(each, scale) for each in plan.strategies),
        "device GB: states+activations+window; checkp.: checkpointing /micro-batches; expos.: step",
        "beyond computation; %: computation in it; link: Gbit/s of a node where that is 50/75/90 %",
        "*: changes training; how many more steps it needs to a loss is in no ranking",
    ]
    for alone in (plan.one_node, plan.one_device):
        if alone is not None:
            found.append(f"{_where(alone)} alone: {alone.name}, {_seconds(alone)}")
    for cost in plan.best:
        text = f"{cost.strategy} on {cost.devices}: {_between(cost.tokens_per_day)} tokens per day"
        if cost.hours:
            text += f", {_between(cost.hours)} hours"
        if cost.price:
            text += f", price {_between(cost.price)}"
        found += _TEXT.wrap(text)
        found += [f"  {line}" for line in (cost.attach or "").splitlines()]
    return [*found, *_TEXT.wrap(_TRIED)]
