"""Descriptions of codecs, which ranks compare before they send."""

from shardlab.codecs.registry import make_method
from shardlab.codecs.wire import describe
from tests.codecs.codec_examples import METHODS, SPECS


def test_descriptions_differ_where_options_do():
    specs = [*SPECS, *METHODS, "topk:density=0.2,values=bf16", "randomk:density=0.2,values=bf16"]
    specs += ["topk:density=0.2", "randomk:density=0.3", "randomk:density=0.2"]
    specs_by_description = {describe(make_method(spec)): spec for spec in specs}
    assert list(specs_by_description.values()) == specs
