"""Payloads of one fixed vector, kept in files: what guards the wire formats against change.

    PYTHONPATH=. python tests/codecs/golden_payloads.py

writes the files of all codecs that are absent. A format that is meant to change gets a new
`VERSION` and new files; a file that is there is never written over.
"""

import json
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from tests.codecs.all_specs import SPECS

VERSION = 1
FOLDER = Path(__file__).with_name("golden")
KEY = MessageKey(seed=7, step=3, unit="blocks.0", rank=1)
_ELEMENTS = 203
_SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1754942e-38, 0.5, -0.5, 2.0, -2.0)
"""zeros, subnormal numbers of both signs, and ties of magnitude"""


def vector() -> Tensor:
    """float32 [203]: both signs, magnitudes from 2**-4 to 8, and the special values among them."""
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
    """The file of a codec spec."""
    return FOLDER / f"{re.sub(r'[^a-z0-9.]+', '-', spec)}.v{VERSION}.json"


def made(spec: str) -> dict[str, str]:
    """What the file of a spec should hold, as the code makes it: bytes in hexadecimal."""
    codec = make_codec(spec)
    payload = codec.encode(vector(), KEY)
    return {"spec": spec, "payload": _hex(payload), "decoded": _hex(decoded(spec, payload))}


def decoded(spec: str, payload: Tensor) -> Tensor:
    """The floats of a payload of the vector."""
    return make_codec(spec).decode(payload, _ELEMENTS, KEY)


def from_hex(text: str) -> Tensor:
    """uint8 from what a file holds."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _hex(values: Tensor) -> str:
    return bytes(values.view(torch.uint8).tolist()).hex(" ", -32)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in SPECS:
        if not path(each).exists():
            path(each).write_text(json.dumps(made(each), indent=1) + "\n")
            print(path(each))
