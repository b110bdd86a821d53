"""Payloads of one fixed vector, kept in files: they guard the wire formats against change.

    python -m tests.codecs.golden_payloads

writes the files that are missing, one for each example of a codec's specification. Run it once the
laws pass (`pytest tests/codecs/test_codec_laws.py`) and before the codec is used: from then on the
bytes are fixed. A file is never overwritten. A format that is meant to change gets a new `VERSION`
and new files.
"""

import json
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from tests.codecs.codec_examples import SPECS

VERSION = 1
FOLDER = Path(__file__).with_name("golden")
KEY = MessageKey(seed=7, step=3, unit="blocks.0", rank=1)
_ELEMENTS = 203
_SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1754942e-38, 0.5, -0.5, 2.0, -2.0)
"""Zeros, subnormal numbers of both signs, and ties of magnitude."""


def vector() -> Tensor:
    """Return float32 [203] of both signs, with magnitudes from 2**-4 to 8 and special values."""
    state, values = 1, []
    for i in range(_ELEMENTS):
        state = (state * 1103515245 + 12345) % 2**31  # the example generator of the C standard
        mantissa = 1 + (state >> 8 & 0xFFFF) / 2**16
        sign = -1 if state >> 24 & 1 else 1
        values.append(sign * math.ldexp(mantissa, -((state >> 25) % 7) + 2))
        if i % 20 == 19:
            values[-1] = _SPECIAL[i // 20]
    return torch.tensor(values, dtype=torch.float32)


def path(spec: str) -> Path:
    """Return the file of a codec spec."""
    return FOLDER / f"{re.sub(r'[^a-z0-9.]+', '-', spec)}.v{VERSION}.json"


def expected_content(spec: str) -> dict[str, str]:
    """Return the expected content of the file of a spec: bytes in hexadecimal."""
    codec = make_codec(spec)
    payload = codec.encode(vector(), KEY)
    return {"spec": spec, "payload": _hex(payload), "decoded": _hex(decoded(spec, payload))}


def decoded(spec: str, payload: Tensor) -> Tensor:
    """Return the floats that a payload of the vector decodes to."""
    return make_codec(spec).decode(payload, _ELEMENTS, KEY)


def from_hex(text: str) -> Tensor:
    """Return the bytes of a hexadecimal text as uint8."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _hex(values: Tensor) -> str:
    return bytes(values.view(torch.uint8).tolist()).hex(" ", -32)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for spec in SPECS:
        if not path(spec).exists():
            path(spec).write_text(json.dumps(expected_content(spec), indent=1) + "\n")
            print(path(spec))
