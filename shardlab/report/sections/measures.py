"""Sections with measures by run: traffic, codec statistics, use of resources."""

import json
from typing import Literal

from shardlab.report.evidence import section_of_runs
from shardlab.report.tables import (
    ABSENT,
    KB,
    MB,
    RUN,
    Column,
    Row,
    figure,
    optional,
    or_divergence,
    plain,
    scientific,
    share,
    spread,
    where_known,
    words,
)


def _gradient_error(row: Row) -> str:
    error = row["grad_rel_error"]
    return scientific(error) if 0 < error < 1e-3 else optional(error)


def _uncompressed(row: Row) -> str:
    counts = json.loads(row["uncompressed"])
    return "; ".join(f"{reason}: {figure(count)}" for reason, count in counts.items()) or ABSENT


def _of_kind(kind: Literal["gradients", "weights"], codec: str) -> list[Column]:
    return [
        Column(f"{kind} codec", "", words(f"{kind}_codec"), codec, False),
        Column(
            f"{kind} raw",
            "MB/step",
            plain(f"{kind}_bytes_raw", scale=MB),
            f"raw bytes of {kind}",
        ),
        Column(
            f"{kind} wire",
            "MB/step",
            plain(f"{kind}_bytes_wire", scale=MB),
            f"wire bytes of {kind}",
        ),
        Column(
            f"{kind} ratio",
            "",
            where_known(f"{kind}_ratio"),
            f"raw over wire bytes of {kind}",
        ),
    ]


TRAFFIC = [
    RUN,
    *_of_kind("gradients", "codec of gradients; with two levels, also the one between nodes"),
    *_of_kind("weights", "codec of parameters in all-gather"),
    Column(
        "between nodes",
        "MB/step",
        where_known("bytes_between_nodes", scale=MB),
        "with two levels: wire bytes that a rank sends to other nodes",
    ),
    Column("indices", "kB/step", plain("index_bytes", scale=KB), "bytes of indices of elements"),
    Column(
        "metadata",
        "kB/step",
        plain("metadata_bytes", scale=KB),
        "bytes of scales, counts and headers",
    ),
    Column("collectives", "1/step", plain("collectives"), "number of collectives"),
    Column(
        "extra collectives",
        "1/step",
        plain("extra_collectives"),
        "collectives that an uncompressed run does not need",
    ),
    Column(
        "in extra collectives",
        "ms/step",
        plain("extra_collective_ms"),
        "time in extra collectives, waits for other ranks included",
    ),
    Column(
        "sent uncompressed",
        "messages/step",
        _uncompressed,
        "messages that are sent without their codec, by reason",
        False,
    ),
]

CODECS = [
    RUN,
    Column(
        "error feedback",
        "",
        words("error_feedback"),
        "data type of the residual that is added to the next gradient",
        False,
    ),
    Column("encode", "ms/step", plain("encode_ms"), "time of encoding before sending"),
    Column("decode", "ms/step", plain("decode_ms"), "time of decoding after receiving"),
    Column(
        "density",
        "% sent",
        where_known("density", scale=100),
        "fraction of elements that a sparse codec sends",
    ),
    Column("residual", "norm", where_known("residual_norm"), "norm of the error feedback residual"),
    Column(
        "gradient error",
        "",
        _gradient_error,
        "|decoded mean gradient - exact mean gradient| / |exact|, on the audited steps",
    ),
    Column(
        "cosine",
        "",
        where_known("grad_cosine", 4),
        "cosine similarity of decoded and exact mean gradient, on the audited steps",
    ),
    Column(
        "train loss",
        "nats",
        or_divergence(spread("train_loss", 4)),
        "mean over the last tenth of the steps",
    ),
    Column("clipped", "steps", plain("clipped_steps"), "steps with gradient clipping"),
    Column("skipped", "steps", plain("skipped_steps"), "steps skipped: gradient not finite"),
    Column(
        "invalid",
        "steps",
        plain("invalid_steps"),
        "skipped steps that the search for the loss scale of fp16 does not explain",
    ),
]

EFFICIENCY = [
    RUN,
    Column(
        "memory growth",
        "MB/rank",
        plain("memory_growth_bytes", scale=MB),
        "growth of the largest rank from before the model is built to its peak in training, "
        "without mapped files; the allocator of the C library keeps some freed memory, which "
        "no estimate contains",
    ),
    Column(
        "estimate, traced",
        "MB/rank",
        where_known("memory_estimate_bytes", scale=MB),
        "peak of a step on fake tensors before the run, without the buffers of codecs",
    ),
    Column(
        "estimate, closed form",
        "MB/rank",
        where_known("memory_closed_form_bytes", scale=MB),
        "the same by formula, from model and strategy",
    ),
    Column(
        "growth / estimate",
        "",
        where_known("memory_ratio"),
        "measured growth over the traced estimate, or over the closed form if there is none",
    ),
    Column(
        "reserved",
        "MB/rank",
        where_known("memory_reserved_bytes", scale=MB),
        "peak memory reserved by torch on a GPU",
    ),
    Column(
        "FLOPs utilization",
        "%",
        share("flops_share"),
        "model FLOPs per second at the throughput of the timing, 6 N + 12 L H Q T per token "
        "(Chowdhery et al. 2022, appendix B), over the measured FLOPs per second of matrix "
        "products of the same type on all ranks",
    ),
    Column(
        "matrix product",
        "GFLOP/s",
        plain("product_flops_per_s", scale=1e-9),
        "best square matrix product of a rank while all ranks multiply",
    ),
    Column(
        "scaling efficiency",
        "%",
        where_known("scaling_efficiency", scale=100),
        "tokens per second and rank relative to the same strategy on one rank, from timings",
    ),
    Column(
        "collectives in training",
        "ms/step",
        where_known("collective_ms"),
        "time of a training step with at least one collective in flight, waits included",
    ),
    Column(
        "bandwidth, raw",
        "MB/s",
        where_known("effective_bandwidth_raw", scale=MB),
        "raw bytes over the time in collectives: apparent bandwidth of the link",
    ),
    Column(
        "bandwidth, wire",
        "MB/s",
        where_known("effective_bandwidth_wire", scale=MB),
        "wire bytes over the time in collectives",
    ),
]

traffic = section_of_runs("Traffic", TRAFFIC)
codec_statistics = section_of_runs("Codec statistics", CODECS)
efficiency = section_of_runs("Memory, compute and link", EFFICIENCY)
