"""Laws of the rule that chooses, and its answers to questions with a known one."""

import math
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.choose.rank import (
    MARGIN,
    TORCH_ENGINES,
    Option,
    is_faster,
    is_tolerated,
    quotient,
    rank,
    simplicity_of,
)
from shardlab.results.interval import Ratio
from shardlab.strategy.document import parse_strategy

UNKNOWN = math.nan
TOLERANCE = 0.03
BOUNDED, MEMORY = st.floats(0.2, 5.0), 100.0


@st.composite
def ratios(draw):
    """A ratio with its interval, or without one."""
    mean = draw(BOUNDED)
    if draw(st.booleans()):
        return Ratio(mean, UNKNOWN, UNKNOWN)
    wide = draw(st.floats(1.0, 2.0))
    return Ratio(mean, mean / wide, mean * wide)


@st.composite
def many(draw):
    """Options of all kinds, and one or two alone."""
    number = count()
    several = st.builds(
        lambda **fields: Option(f"option {next(number)}", **fields),
        step=ratios(),
        devices=st.sampled_from([2, 8]),
        measured=st.booleans(),
        lossless=st.booleans(),
        perplexity=st.sampled_from([None, *(Ratio(r, r - 0.01, r + 0.01) for r in (1.0, 1.05))]),
        memory=st.sampled_from([0.0, 2 * MEMORY]),
        simplicity=st.integers(0, 3),
    )
    single = st.builds(lambda step: Option(f"alone {next(number)}", step), step=ratios())
    options = draw(st.lists(several, max_size=6))
    return options, draw(st.lists(single, min_size=1, max_size=2))


def ranked(options, single=(), **how):
    return rank(options, [*single], TOLERANCE, **{"memory": MEMORY, **how})


@given(many())
def test_each_option_stands_once_and_what_stands_apart_has_a_reason(drawn):
    options, single = drawn
    ranking = ranked(options, single)
    names = [entry.option.name for entry in (*ranking.order, *ranking.apart)]
    assert sorted(names) == sorted(option.name for option in (*options, *single))
    assert all(entry.reason for entry in (*ranking.order, *ranking.apart))


@given(many(), st.randoms(use_true_random=False))
def test_the_order_in_which_options_are_passed_says_nothing(drawn, random):
    options, single = drawn
    shuffled = [*options]
    random.shuffle(shuffled)
    assert ranked(options, single).order == ranked(shuffled, single[::-1]).order


@given(many(), st.floats(0.1, 10.0))
def test_the_common_reference_says_nothing(drawn, factor):
    options, single = drawn

    def scaled(option):
        return option._replace(step=Ratio(*(factor * end for end in option.step)))

    before = ranked(options, single, compare=exact).names
    assert before == ranked(map_of(scaled, options), map_of(scaled, single), compare=exact).names


def map_of(change, options):
    return [change(option) for option in options]


def exact(option, other):
    """The quotient to nine digits, as a factor that cancels may leave a rounding error."""
    return Ratio(*(float(f"{end:.9g}") for end in quotient(option, other)))


@given(many())
def test_nothing_stands_before_what_is_shown_to_be_faster(drawn):
    order = [entry.option for entry in ranked(*drawn).order]
    for position, option in enumerate(order):
        assert not any(is_faster(later, option) for later in order[position:])


@given(many())
def test_what_is_used_fits_and_keeps_the_quality(drawn):
    for entry in ranked(*drawn).order:
        option = entry.option
        assert option.memory <= MEMORY
        assert is_tolerated(option.perplexity, TOLERANCE, option.lossless)


@given(many(), st.floats(0.1, 1.0))
def test_the_first_stays_so_when_it_becomes_faster(drawn, factor):
    options, single = drawn
    first = ranked(options, single).first
    if first is None or first in single:
        return
    faster = first._replace(step=Ratio(*(factor * end for end in first.step)))
    changed = [faster if option == first else option for option in options]
    assert ranked(changed, single).first.name == first.name


@given(many())
def test_what_is_not_shown_to_beat_one_device_does_not_come_before_what_is(drawn):
    options, single = drawn
    ranking = ranked(options, single)
    first = ranking.first
    beats = {
        option.name: option.measured and all(is_faster(option, other) for other in single)
        for option in (entry.option for entry in ranking.order)
    }
    usable = [entry.option for entry in ranking.order if entry.option not in single]
    if any(beats[option.name] for option in usable) and first.measured:
        better = [o for o in usable if beats[o.name]]
        assert beats[first.name] or all(is_faster(first, option) for option in better)


@given(many(), st.data())
def test_what_is_in_use_is_displaced_only_by_what_is_shown_to_be_faster(drawn, data):
    options, single = drawn
    order = [entry.option for entry in ranked(options, single).order]
    used = data.draw(st.sampled_from(order))
    names = ranked(options, single, in_use=used.name).names
    before = names[: names.index(used.name)]
    assert all(is_faster(option, used) for option in order if option.name in before)


def option(name, mean, spread=None, **fields):
    ends = (UNKNOWN, UNKNOWN) if spread is None else (mean / spread, mean * spread)
    return Option(name, Ratio(mean, *ends), **{"devices": 2, **fields})


ALONE = option("one", 1.0, 1.0, devices=1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        # an interval decides, however small the difference
        ([option("a", 0.99, 1.001), option("b", 0.98, 1.001)], ["b", "a", "one"]),
        # not told apart: torch's own first, then the smaller mean
        ([option("a", 0.8, 1.1, simplicity=4), option("b", 0.81, 1.1)], ["b", "a", "one"]),
        ([option("a", 0.8, 1.1), option("b", 0.81, 1.1)], ["a", "b", "one"]),
        # without loss before what has one
        (
            [
                option("a", 0.8, 1.1, lossless=False, perplexity=Ratio(1, 1, 1)),
                option("b", 0.81, 1.1),
            ],
            ["b", "a", "one"],
        ),
        # what is not shown to be faster than one device comes after it
        ([option("a", 0.9, 1.2)], ["one", "a"]),
        # and before that what is
        ([option("a", 0.8, 1.3), option("b", 0.9, 1.05, simplicity=4)], ["b", "one", "a"]),
        # without intervals the margin decides
        ([option("a", 0.95)], ["one", "a"]),
        ([option("a", 0.89)], ["a", "one"]),
        # a prediction does not displace a measurement within the margin
        ([option("a", 0.8, 1.01, measured=False), option("b", 0.85, 1.01)], ["b", "a", "one"]),
        ([option("a", 0.7, 1.01, measured=False), option("b", 0.85, 1.01)], ["a", "b", "one"]),
    ],
)
def test_what_to_use(options, names):
    assert ranked(options, [ALONE]).names == names


def test_what_is_simpler_does_not_displace_what_is_in_use_unless_it_is_faster():
    used = option("used", 1.0, 1.01, simplicity=4)
    options = [used, option("fast", 0.8, 1.1, simplicity=4), option("simple", 0.9, 1.2)]
    assert ranked(options).names == ["simple", "fast", "used"]
    assert ranked(options, in_use="used").names == ["fast", "used", "simple"]


def test_one_margin_tells_apart_what_has_no_interval():
    at, beyond = 1 / (1 + MARGIN), 0.99 / (1 + MARGIN)
    assert not is_faster(option("a", at), option("b", 1.0))
    assert is_faster(option("a", beyond), option("b", 1.0))


def test_paired_measurements_count_before_the_quotient():
    first, second = option("a", 0.9, 1.5), option("b", 0.8, 1.5)
    paired = {("a", "b"): Ratio(0.9, 0.85, 0.95), ("b", "a"): Ratio(1.11, 1.05, 1.18)}

    def compare(option, other):
        return paired.get((option.name, other.name)) or quotient(option, other)

    assert ranked([first, second]).names == ["b", "a"]
    assert ranked([first, second], compare=compare).names == ["a", "b"]


def test_measurements_that_contradict_each_other_still_have_an_order():
    beats = {("a", "b"), ("b", "c"), ("c", "a")}

    def compare(option, other):
        ratio = 0.5 if (option.name, other.name) in beats else 2.0
        return Ratio(ratio, ratio, ratio)

    options = [option(name, 1.0) for name in "abc"]
    assert ranked(options, compare=compare).names == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"perplexity": None}, "its perplexity was not measured"),
        ({"perplexity": Ratio(1.05, 1.04, 1.06)}, "its perplexity is above 1.030 times"),
        ({"perplexity": Ratio(1.02, 1.0, 1.04)}, "is not shown to be below 1.030 times"),
        ({"perplexity": Ratio(1.0, UNKNOWN, UNKNOWN)}, "one seed has no interval"),
        ({"perplexity": Ratio(math.inf, math.inf, math.inf)}, "is above 1.030 times"),
        ({"lossless": True, "perplexity": Ratio(1.1, UNKNOWN, UNKNOWN)}, "above 1.030 times"),
        ({"lossless": True, "memory": 2e6}, "peak memory is above 1 MB"),
        ({"lossless": True, "step": None}, "its step is neither measured nor predicted"),
    ],
)
def test_what_may_not_be_used_stands_apart(fields, reason):
    lossy = option("a", 0.5, 1.0, lossless=False)._replace(**fields)
    ranking = ranked([lossy], [ALONE], memory=1e6)
    assert ranking.names == ["one"]
    assert reason in ranking.apart[0].reason


def test_what_has_no_loss_needs_no_seeds():
    one_seed = option("a", 0.5, 1.0, perplexity=Ratio(1.01, UNKNOWN, UNKNOWN))
    assert ranked([one_seed, option("b", 0.6, 1.0)]).names == ["a", "b"]


def test_of_unknown_quality_the_break_even_with_the_fastest_without_loss_is_known():
    options = [
        option("plain", 0.8),
        option("coded", 0.4, lossless=False),
        option("slow", 1.6, lossless=False),
        option("worse", 0.4, lossless=False, perplexity=Ratio(1.2, 1.1, 1.3)),
    ]
    # not told apart from what is used, and faster in the mean
    options.append(option("other", 0.75, simplicity=4))
    ranking = ranked(options, [ALONE])
    assert ranking.first.name == "plain"
    assert ranking.break_even == pytest.approx({"coded": 0.75 / 0.4, "slow": 0.75 / 1.6})
    assert ranking.gaining == ["coded"]


def test_where_losses_were_measured_the_time_to_one_loss_is_ranked():
    """A shorter step that needs more of them, whatever its perplexity after as many tokens."""
    quick = option("quick", 0.5, 1.0, lossless=False)
    loss = {"quick": Ratio(1.2, 1.1, 1.3), "plain": Ratio(0.9, 0.85, 0.95), "one": Ratio(1, 1, 1)}
    options = [quick, option("plain", 0.8, 1.0), ALONE]
    timed = [option._replace(to_loss=loss[option.name]) for option in options]
    assert ranked(timed[:2], timed[2:]).names == ["plain", "one", "quick"]
    ranking = ranked([*timed[:2], option("short", 0.1, 1.0)], timed[2:])
    assert ranking.apart[0].reason == "its time to the loss was not measured"


def test_every_place_has_its_reason():
    options = [option("a", 0.8, 1.1), option("b", 0.81, 1.1, simplicity=4), option("c", 2.0, 1.1)]
    reasons = {entry.option.name: entry.reason for entry in ranked(options, [ALONE]).order}
    assert reasons["a"] == "not told apart from b, but is simpler"
    assert reasons["b"] == "not told apart from a, which is simpler"
    assert reasons["c"].startswith("takes 2.50 (2.18 to 2.86) times as long as a")
    assert ranked([], [ALONE]).order[0].reason == "nothing else may be used"


def test_torch_is_simpler_than_this_project_and_codecs_are_not():
    forms = [
        *({"engine": engine} for engine in TORCH_ENGINES),
        {"engine": "manual"},
        {"engine": "ddp", "gradients": {"codec": "int8"}},
        {"gradients": {"codec": "int8"}},
        {"engine": "manual", "gradients": {"codec": "int8"}},
    ]
    order = [simplicity_of(parse_strategy(form).canonical()) for form in forms]
    assert order == sorted({*order})
    rare = simplicity_of(parse_strategy({"engine": "ddp", "sync": {"every": 8}}).canonical())
    exchanged = {"gradients": {"codec": "none", "route": "exchange"}}
    assert rare > order[3] < simplicity_of(parse_strategy(exchanged).canonical())


@pytest.mark.parametrize("time", ["step", "to_loss"])
@pytest.mark.parametrize("in_use", [None, "unknown"])
def test_a_time_without_a_measurement_is_no_reason_to_use_an_option(time, in_use):
    nothing = Ratio(UNKNOWN, UNKNOWN, UNKNOWN)
    fields = {"step": Ratio(0.5, UNKNOWN, UNKNOWN), "measured": False, "simplicity": 1}
    if time == "to_loss":
        fields["to_loss"] = fields["step"]
    unknown = Option("unknown", **{"step": Ratio(1.0, UNKNOWN, UNKNOWN), time: nothing})
    ranking = ranked([unknown, Option("known", **fields)], in_use=in_use)
    assert ranking.names == ["known"]
    assert [r.option.name for r in ranking.apart] == ["unknown"]
    assert "measured" in ranking.apart[0].reason
