"""The cases of the benchmarks are valid and leave no codec out."""

import pytest
import yaml
from pydantic import TypeAdapter

from benchmarks import cases
from benchmarks.other_codecs import RIVALS
from shardlab.core.errors import UserError
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Params
from shardlab.strategy.codec_table import AnyCodec, built_in

ENTRIES = yaml.safe_load(cases._FILE.read_text())


@pytest.mark.parametrize("spec", [e["spec"] for e in ENTRIES] + [r.ours for r in RIVALS])
def test_every_spec_is_one_that_a_strategy_may_name(spec):
    TypeAdapter(AnyCodec).validate_python(spec)


def test_every_codec_is_a_case():
    """Those that codecs.yaml does not list come from the table."""
    assert {case.name for case in cases.cases()} >= set(built_in())


def test_the_experiment_on_all_codecs_is_whole_and_runs_all_its_strategies():
    params = Parameters("params/codecs.yaml")
    params(*Params.model_fields)
    assert params("runs") == list(params("strategies"))


def test_a_case_that_does_not_exist_is_refused():
    assert [case.spec for case in cases.cases(["bf16"])] == ["bf16"]
    with pytest.raises(UserError, match="int9"):
        cases.cases(["int9"])
