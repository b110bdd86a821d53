import pytest

from shardlab.config.machine import Link, bits_per_second
from shardlab.core.document import validate
from shardlab.core.errors import UserError


def test_units_of_rates_are_powers_of_ten():
    assert bits_per_second("100mbit") == 100_000_000
    assert bits_per_second("2.5gbit") == 2_500_000_000
    assert bits_per_second("64kbit") == 64_000


@pytest.mark.parametrize("rate", ["", "100", "100 mbit", "0mbit", "-1gbit", "100mbps", "1mbit;ls"])
def test_invalid_rates_are_refused(rate):
    with pytest.raises(UserError, match="100mbit"):
        bits_per_second(rate)
    with pytest.raises(UserError, match=r"link\.rate: .*100mbit"):
        validate(Link, {"rate": rate}, "link")


def test_name_of_link_has_rate_and_delay():
    assert Link(rate="1gbit").name == "1gbit"
    assert Link(rate="100mbit", delay_ms=2.5).name == "100mbit + 2.5 ms"
