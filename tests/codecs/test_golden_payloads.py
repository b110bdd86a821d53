"""Wire formats are fixed: every codec writes and reads the bytes in its golden file."""

import json

import pytest
import torch

from tests.codecs.codec_examples import SPECS
from tests.codecs.golden_payloads import FOLDER, decoded, expected_content, from_hex, path

every_spec = pytest.mark.parametrize("spec", SPECS)


def stored(spec: str) -> dict[str, str]:
    return json.loads(path(spec).read_text())


@every_spec
def test_encode_writes_the_bytes_in_the_file(spec):
    assert expected_content(spec) == stored(spec)


@every_spec
def test_bytes_in_the_file_decode_to_its_floats(spec):
    file = stored(spec)
    floats = decoded(spec, from_hex(file["payload"]))
    assert torch.equal(floats.view(torch.uint8), from_hex(file["decoded"]))


def test_every_file_belongs_to_an_example():
    assert {file.name for file in FOLDER.iterdir()} == {path(spec).name for spec in SPECS}
