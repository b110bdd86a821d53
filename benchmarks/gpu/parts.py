"""The parts: commands with time limits, the most telling first.

Limits are for a GPU and 16 cores. There `correct` and `measure` get five minutes each, so that what
comes last may be skipped.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from shardlab.strategy.codec_table import BUILT_IN


class Part(NamedTuple):
    """A command of Python that fails by its exit code."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    only_on_gpu: bool = False
    alone: bool = False
    """beside which nothing may run: it is timed"""


_MEASURED_CODECS = ("int8:group=128", "int4:group=128", "topk:density=0.01", "bf16", "fp8", "none")
_FIRST_CODECS = ("int8", "int4", "topk", "bf16")
_WIDE = {"COLUMNS": "400"}
"""or pytest cuts what failed to the width of a terminal"""
_ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""parts that compile run beside each other"""


def correct_parts(device: str) -> list[Part]:
    """Return the tests on a device, `cuda` or `cpu`."""
    part = partial(_tested, device)

    def engine(name: str) -> Part:
        test = "an_engine_computes_the_losses_of_a_cpu"
        return part(f"engine:{name}", 120, "engines", test, [name])

    def shared(name: str, *cases: str) -> Part:
        test = "two_ranks_compute_what_they_compute_on_a_cpu"
        return part(f"shared:{name}", 150, "engines", test, cases or [name])

    decodes = "a_device_decodes_to_the_values_of_the_cpu"
    eager = {"TORCH_COMPILE_DISABLE": "1"}

    def codec(name: str) -> Part:
        cases = BUILT_IN[name].examples
        return part(f"codec:{name}", 200, "codecs", decodes, cases, _ONE_COMPILER)

    codecs = [name for name, spec in BUILT_IN.items() if not spec.multi_phase]
    memory = "page_locked_memory_copies_events_and_futures_are_those_of_cuda"
    lane = "a_lane_begins_after_what_was_launched_and_ends_before_what_waits_for_it"
    larger = "a_model_larger_than_the_memory_trains_as_one_that_fits"
    layers = "updates_on_the_host_train_a_model_on_the_device"
    ddp = "ddp_with_a_codec_computes_what_it_computes_on_a_cpu"
    races = "late_lanes_and_late_computation_change_no_bit"
    compiled = "no_key_and_no_step_is_a_constant_of_compiled_code"
    return [
        part("memory", 60, "streams", memory, gpu=True),
        part("lanes", 60, "streams", lane, gpu=True),
        *(engine(name) for name in ("ddp", "fsdp2", "manual", "slide", "fsdp2-offload")),
        part("codecs-eager", 120, "codecs", decodes, environment=eager),
        *(codec(name) for name in _FIRST_CODECS),
        part("slide-larger", 150, "slide", larger),
        part("layer-adam", 60, "slide", layers),
        part("ddp-codecs", 150, "engines", ddp),
        *(shared(name) for name in ("ddp", "ddp-int8", "manual", "manual-int8", "fsdp2-int8")),
        *(shared(name) for name in ("slide", "slide-topk")),
        shared("bf16", "ddp-bf16", "manual-bf16"),
        part("shared:attach", 150, "attach", "a_script_trains_as_on_a_cpu"),
        part("races", 150, "streams", races),
        part("waits", 120, "streams", "a_step_makes_the_host_wait_once", gpu=True),
        part("recompiles", 120, "streams", compiled, gpu=True),
        part("slide-saves", 100, "slide", "sliding_continues_bit_for_bit"),
        part("states", 90, "engines", "state_that_was_loaded_on_the_host_continues"),
        part("activations", 90, "engines", "activations_elsewhere_change_no_bit"),
        part("deterministic", 150, "engines", "deterministic_runs_repeat_every_bit"),
        part("record", 150, "engines", "a_record_says_what_it_was_measured_on"),
        *(codec(name) for name in codecs if name not in _FIRST_CODECS),
        part("engines-all", 200, "engines", "an_engine_computes_the_losses_of_a_cpu"),
        part("two-gpus", 200, "engines", "two_gpus_compute_what_two_ranks_compute", gpu=True),
        part("sanitizer", 280, "engines", "kernels_pass_the_sanitizer", gpu=True),
    ]


def _tested(
    device: str,
    name: str,
    limit_s: float,
    file: str,
    test: str,
    cases: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    gpu: bool = False,
) -> Part:
    """Return a test of `tests/gpu` as a part: all of its cases on a device, or some."""
    marked = "gpu" if device == "cuda" else "not gpu"
    path = f"tests/gpu/test_gpu_{file}.py::test_{test}"
    tests = [f"{path}[{case}-{device}]" for case in cases] or [path]
    quiet = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", marked)
    return Part(name, limit_s, (*quiet, *tests), {**_WIDE, **environment}, gpu)


def measure_parts(out: str) -> list[Part]:
    """Return the benchmarks, which leave their rows in a folder."""

    def part(name: str, limit_s: float, module: str, *words: str) -> Part:
        command = ("-m", f"benchmarks.gpu.{module}", *words, "--out", out)
        return Part(name, limit_s, command, alone=True)

    def larger(name: str, limit_s: float, *words: str) -> Part:
        return part(f"larger:{name}", limit_s, "larger", *words)

    def train(name: str, limit_s: float, *words: str) -> Part:
        return part(f"train:{name}", limit_s, "training", name, *words)

    capped = ("ddp", "slide", "fsdp2", "--cap", "12", "--layers", "36", "--width", "2560")
    return [
        part("ceilings", 45, "rates"),
        train("ddp", 50),
        train("slide", 50, "--trace"),
        larger("slide", 100, "slide"),
        larger("fsdp2", 100, "fsdp2"),
        part("codec-rates", 110, "rates", *_MEASURED_CODECS),
        train("ddp-int8", 60, "--trace"),
        larger("trace", 80, "slide", "--trace"),
        train("fsdp2", 50),
        train("manual", 50),
        larger("capped", 150, *capped, "--samples", "4", "--steps", "2"),
        larger("ddp", 60, "ddp"),
        train("ddp-compiled", 60),
    ]
