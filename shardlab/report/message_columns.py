"""The columns on messages: what moved of which kind, and what the codecs did to it."""

import json
from typing import Literal

from shardlab.report.cells import (
    KB,
    MB,
    RUN,
    Column,
    Row,
    plain,
    spread,
    where_known,
    words,
)
from shardlab.report.numbers import ABSENT, figure, optional, scientific


def _gradient_error(row: Row) -> str:
    error = row["grad_rel_error"]
    return scientific(error) if 0 < error < 1e-3 else optional(error)


def _uncompressed(row: Row) -> str:
    counts = json.loads(row["uncompressed"])
    return "; ".join(f"{reason}: {figure(count)}" for reason, count in counts.items()) or ABSENT


def _of_kind(kind: Literal["gradients", "weights"], codec: str) -> list[Column]:
    return [
        Column(f"{kind} as", "", words(f"{kind}_codec"), codec, False),
        Column(
            f"{kind} raw",
            "MB/step",
            plain(f"{kind}_bytes_raw", scale=MB),
            f"the part of the raw bytes that are {kind}",
        ),
        Column(
            f"{kind} wire",
            "MB/step",
            plain(f"{kind}_bytes_wire", scale=MB),
            f"the part of the bytes on the wire that are {kind}",
        ),
        Column(
            f"{kind} ratio",
            "",
            where_known(f"{kind}_ratio"),
            f"raw over wire bytes of the {kind} alone",
        ),
    ]


TRAFFIC = [
    RUN,
    *_of_kind("gradients", "codec that gradients travel in; with two levels, also between nodes"),
    *_of_kind("weights", "codec that the parameters travel in when they are gathered"),
    Column(
        "between nodes",
        "MB/step",
        where_known("bytes_between_nodes", scale=MB),
        "with two levels: the part of the bytes on the wire that one rank sends to other nodes",
    ),
    Column(
        "index", "kB/step", plain("index_bytes", scale=KB), "bytes that say which elements are sent"
    ),
    Column("metadata", "kB/step", plain("metadata_bytes", scale=KB), "scales, counts and headers"),
    Column("collectives", "1/step", plain("collectives"), "messages that all ranks take part in"),
    Column(
        "extra collectives",
        "1/step",
        plain("extra_collectives"),
        "those that only the codec needs",
    ),
    Column(
        "in extra collectives",
        "ms/step",
        plain("extra_collective_ms"),
        "time in those, waits for other ranks included",
    ),
    Column(
        "left uncompressed",
        "messages/step",
        _uncompressed,
        "messages that a codec was meant for and that travelled as they are, by their reason",
        False,
    ),
]

CODECS = [
    RUN,
    Column(
        "error feedback",
        "",
        words("error_feedback"),
        "type in which a rank keeps what it did not send, for the next gradient",
        False,
    ),
    Column("encode", "ms/step", plain("encode_ms"), "time in the codec before sending"),
    Column("decode", "ms/step", plain("decode_ms"), "time in the codec after receiving"),
    Column(
        "density",
        "% sent",
        where_known("density", scale=100),
        "share of the elements that a sparse codec sent",
    ),
    Column(
        "residual", "norm", where_known("residual_norm"), "norm of what error feedback holds back"
    ),
    Column(
        "gradient error",
        "",
        _gradient_error,
        "|mean gradient as received minus exact mean gradient| / |exact|, on the audited steps",
    ),
    Column(
        "cosine",
        "",
        where_known("grad_cosine", 4),
        "between the mean gradient as received and the exact one, on the audited steps",
    ),
    Column("train loss", "nats", spread("train_loss", 4), "mean of the last tenth of the steps"),
    Column(
        "clipped",
        "steps",
        plain("clipped_steps"),
        "steps whose gradient norm was cut to the limit",
    ),
    Column("skipped", "steps", plain("skipped_steps"), "steps left out: gradient not finite"),
    Column(
        "invalid",
        "steps",
        plain("invalid_steps"),
        "skipped steps that the search for the loss scale of fp16 does not explain",
    ),
]
