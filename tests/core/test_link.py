"""Links between ranks in parameters."""

import pytest

from shardlab.config.experiment import Params
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.link import Link, bits_per_second


def test_units_of_rates_are_powers_of_ten():
    assert bits_per_second("100mbit") == 100_000_000
    assert bits_per_second("2.5gbit") == 2_500_000_000
    assert bits_per_second("64kbit") == 64_000


@pytest.mark.parametrize("rate", ["", "100", "100 mbit", "0mbit", "-1gbit", "100mbps", "1mbit;ls"])
def test_invalid_rates_are_refused(rate):
    with pytest.raises(UserError, match="100mbit"):
        bits_per_second(rate)
    for wrong in (rate, ["1gbit", rate], 100):
        with pytest.raises(UserError, match=r"link\.rate: .*100mbit"):
            validate(Link, {"rate": wrong}, "link")


def test_name_of_link_has_rate_and_delay():
    assert Link(rate="1gbit").name == "1gbit"
    assert Link(rate="100mbit", delay_ms=2.5).name == "100mbit + 2.5 ms"
    link = validate(Link, {"rate": ["1gbit", "10mbit"], "ranks_per_node": 2}, "link")
    assert link.name == "1gbit/10mbit, 2 ranks per node"
    assert link.rates_of_nodes(4) == (10**9, 10**7) and link.bits_per_second == 10**7
    assert Link(rate="1gbit", ranks_per_node=2).rates_of_nodes(4) == (10**9, 10**9)


def test_text_is_the_rate_alone_wherever_a_link_is():
    def values(link):
        agent = {"link": link, "searches": {"far": {"link": link}}}
        sections = {"train": {"link": link}, "timings": {"far": {"link": link}}, "agent": agent}
        return validate(Params, sections, "")

    assert values("100mbit") == values({"rate": "100mbit"})
    assert values("100mbit").train.meaning()["link"] == Link(rate="100mbit").model_dump()
    for rate in ("100", 100):  # as YAML reads it
        with pytest.raises(UserError, match=r"^train\.link\.rate: link rate '100': write a number"):
            validate(Params, {"train": {"link": rate}}, "")


@pytest.mark.parametrize(
    ("rate", "node", "message"),
    [
        ("1gbit", 3, "4 ranks are not whole nodes of 3: choose a divisor"),
        (["1gbit"] * 3, 2, "3 rates for 2 nodes: give one rate, or one for each node"),
        (["1gbit"] * 2, 1, "2 rates for 4 nodes"),
        ("1gbit", 4, "all 4 ranks are one node, whose link they would not use: lower"),
    ],
)
def test_links_of_other_ranks_are_refused(rate, node, message):
    link = {"rate": rate, "ranks_per_node": node}
    with pytest.raises(UserError, match=f"^link: {message}"):
        validate(Link, link, "link").rates_of_nodes(4)
    for where, section in (
        ("train", {"train": {"world_size": 4, "link": link}}),
        ("agent", {"agent": {"world_size": 4, "link": link}}),
        ("agent.searches.far", {"agent": {"searches": {"far": {"world_size": 4, "link": link}}}}),
        ("timings.far", {"timings": {"far": {"world_size": 4, "link": link}}}),
    ):
        with pytest.raises(UserError, match=f"^{where}.link: {message}"):
            validate(Params, section, "").check_references()
