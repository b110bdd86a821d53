"""Wire formats are fixed: every codec writes and reads the bytes in its golden file."""

import json

import pytest
import torch

from shardlab.config.codec_table import BUILT_IN, split_text
from tests.codecs.codec_examples import SPECS
from tests.codecs.golden_payloads import FOLDER, decoded, from_hex, made, path

every_spec = pytest.mark.parametrize("spec", SPECS)


def stored(spec: str) -> dict[str, str]:
    if not path(spec).exists():
        pytest.fail(
            f"{path(spec).name} is missing: once the laws pass, write it by "
            "`python -m tests.codecs.golden_payloads`"
        )
    return json.loads(path(spec).read_text())


@every_spec
def test_encode_writes_the_bytes_in_the_file(spec):
    assert made(spec) == stored(spec)


@every_spec
def test_bytes_in_the_file_decode_to_its_floats(spec):
    file = stored(spec)
    floats = decoded(spec, from_hex(file["payload"]))
    assert torch.equal(floats.view(torch.uint8), from_hex(file["decoded"]))


def test_every_file_belongs_to_an_example():
    assert {file.name for file in FOLDER.iterdir()} == {path(spec).name for spec in SPECS}


def test_every_codec_has_examples():
    for name, spec in BUILT_IN.items():
        where = f"shardlab/config/codec_options.py: {spec.__name__}.examples"
        assert spec.examples, f"{where}: add a spec such as {name!r}, which the tests run"
        assert {split_text(example)["name"] for example in spec.examples} == {name}, where
