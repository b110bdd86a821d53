"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with random payloads.

    python -m tests.codecs.sanitized [PAYLOADS [SEED]]

builds csrc/ with both sanitizers, runs every kernel, and decodes PAYLOADS (100,000 when not given)
payloads per codec setting: random bytes and encoded vectors with flipped bytes. A report of a
sanitizer ends the command with that report. Prints the payloads that were decoded and refused.
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from shardlab.codecs.registry import make_codec
from shardlab.core.process import die_with_parent
from shardlab.kernels import native
from tests.codecs.codec_examples import SPECS
from tests.codecs.golden_payloads import KEY
from tests.codecs.vectors import any_bits, coded

_FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",  # lines, which reports name; variables, which they do not, would take as long again
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
_SIZES = (0, 1, 7, 8, 127, 129, 1000)


def build_sanitized(folder: Path) -> Path:
    """Build csrc/ with both sanitizers; return the library."""
    library = folder / "sanitized.so"
    sources = map(str, (native.TREE / "csrc").glob("*.cpp"))
    subprocess.run(["c++", *_FLAGS, *sources, "-o", str(library)], check=True)
    return library


def run_sanitized(library: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the run time of the sanitizers, which must be loaded before all else."""
    runtimes = [
        subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        # Python frees nothing at its end, which would be reported as leaks
        "ASAN_OPTIONS": "detect_leaks=0",
        "SHARDLAB_SANITIZED": str(library),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def run_kernels() -> None:
    """Run every codec on vectors of random bits, on one thread and on several."""
    for spec in SPECS:
        for n in (1, 7, 129, 1300, 300_001):
            coded(make_codec(spec), any_bits(n, n), torch.linspace(-1, 1, n))


def decode_random(payloads: int, seed: int) -> tuple[int, int]:
    """Decode random payloads of every codec setting; return how many were decoded and refused.

    Raises:
        Exception: a codec raised another error than the ValueError of its contract.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    decoded = refused = 0
    for spec in SPECS:
        codec = make_codec(spec)
        for _ in range(payloads):
            n = draw.choice(_SIZES)
            payload = codec.encode(torch.randn(n, generator=generator), KEY)
            if payload.numel() and draw.random() < 0.5:
                payload.random_(0, 256, generator=generator)
            for _ in range(draw.randrange(4) if payload.numel() else 0):
                payload[draw.randrange(payload.numel())] = draw.randrange(256)
            if draw.random() < 0.1:
                payload = payload[: draw.randrange(payload.numel() + 1)].clone()
            try:
                codec.decode(payload, n, KEY)
                decoded += 1
            except ValueError:
                refused += 1
    return decoded, refused


def _main(payloads: int = 100_000, seed: int = 0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = build_sanitized(Path(folder))
        command = ("-m", "tests.codecs.sanitized", str(payloads), str(seed))
        done = run_sanitized(library, *command)
        print(done.stdout, done.stderr, sep="", end="")
        sys.exit(done.returncode)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    numbers = [int(argument) for argument in sys.argv[1:]]
    if "SHARDLAB_SANITIZED" in os.environ:
        native.LIBRARY, native.TREE = Path(os.environ["SHARDLAB_SANITIZED"]), Path("absent")
        run_kernels()
        print("decoded {:,}, refused {:,} payloads".format(*decode_random(*numbers)))
    else:
        _main(*numbers)
