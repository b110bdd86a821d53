"""Sections on messages: traffic by kind, and statistics of the codecs."""

import json
from typing import Literal

from shardlab.report.evidence import Evidence
from shardlab.report.numbers import ABSENT, figure, optional, scientific
from shardlab.report.section import Section
from shardlab.report.tables import KB, MB, RUN, Column, Row, plain, spread, where_known, words


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
    Column("train loss", "nats", spread("train_loss", 4), "mean over the last tenth of the steps"),
    Column("clipped", "steps", plain("clipped_steps"), "steps with gradient clipping"),
    Column("skipped", "steps", plain("skipped_steps"), "steps skipped: gradient not finite"),
    Column(
        "invalid",
        "steps",
        plain("invalid_steps"),
        "skipped steps that the search for the loss scale of fp16 does not explain",
    ),
]


def traffic(evidence: Evidence) -> Section:
    """Show bytes and collectives of every run, by kind of message."""
    return Section("Traffic", tables=[evidence.run_table("Traffic", TRAFFIC)])


def codec_statistics(evidence: Evidence) -> Section:
    """Show time and error of the codecs of every run."""
    return Section("Codec statistics", tables=[evidence.run_table("Codec statistics", CODECS)])
