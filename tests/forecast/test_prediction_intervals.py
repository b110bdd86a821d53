import pytest

from shardlab.forecast.machine import CodecLines
from shardlab.forecast.uncertainty import estimate, propagate
from shardlab.forecast.workload import case_of
from tests.forecast.timing_factory import INT8, MACHINE, MODEL, made_run

UNSURE = ((1e-10, 0.0), (0.0, 1e-20))
"""covariance of alpha and beta"""


@pytest.mark.parametrize("name", ["fsdp2", "manual-int8", "slide"])
def test_interval_is_the_same_without_what_a_strategy_does_not_use(name):
    lines = MACHINE.codecs[INT8, False]
    unsure = CodecLines(*(line._replace(covariance=UNSURE) for line in lines[:3]))
    memory = {name: line._replace(covariance=UNSURE) for name, line in MACHINE.memory.items()}
    codecs = {(INT8, False): unsure, ("bf16", False): unsure}
    model = MODEL._replace(machine=MACHINE._replace(codecs=codecs, memory=memory))
    case = case_of(made_run("x", name))
    found = estimate(model, *case)
    assert found == pytest.approx(propagate(lambda m: m.predict(*case), model))
    assert (found.high > found.value) == (name != "fsdp2")
