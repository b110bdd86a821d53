"""Cases of the benchmarks: valid specs, every codec."""

import pytest
import yaml
from pydantic import TypeAdapter

from benchmarks import cases
from benchmarks.other_codecs import RIVALS
from shardlab.config.codec_table import AnyCodec, built_in
from shardlab.core.errors import UserError

ENTRIES = yaml.safe_load(cases._FILE.read_text())


@pytest.mark.parametrize("spec", [e["spec"] for e in ENTRIES] + [r.ours for r in RIVALS])
def test_every_spec_is_valid_in_a_strategy(spec):
    TypeAdapter(AnyCodec).validate_python(spec)


def test_every_codec_has_a_case():
    # those that codecs.yaml does not list come from the table
    assert {case.name for case in cases.cases()} >= set(built_in())


def test_unknown_case_is_refused():
    assert [case.spec for case in cases.cases(["bf16"])] == ["bf16"]
    with pytest.raises(UserError, match="int9"):
        cases.cases(["int9"])
