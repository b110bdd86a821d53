"""The wire formats do not change unnoticed: every codec makes and reads the bytes in its file."""

import json

import pytest
import torch

from shardlab.codecs import registry
from shardlab.strategy.codec_options import MULTI_PHASE
from shardlab.strategy.codec_spec import split_text
from tests.codecs.all_specs import SPECS
from tests.codecs.golden_payloads import FOLDER, decoded, from_hex, made, path

every_spec = pytest.mark.parametrize("spec", SPECS)


@every_spec
def test_encoding_makes_the_bytes_in_the_file(spec):
    stored = json.loads(path(spec).read_text())
    assert made(spec) == stored


@every_spec
def test_the_bytes_in_the_file_decode_to_the_floats_in_it(spec):
    stored = json.loads(path(spec).read_text())
    floats = decoded(spec, from_hex(stored["payload"]))
    assert torch.equal(floats.view(torch.uint8), from_hex(stored["decoded"]))


def test_every_codec_has_a_file_and_every_file_a_codec():
    named = {split_text(spec)["name"] for spec in SPECS}
    assert named == set(registry._BUILT_IN) - set(MULTI_PHASE)
    assert {file.name for file in FOLDER.iterdir()} == {path(spec).name for spec in SPECS}
