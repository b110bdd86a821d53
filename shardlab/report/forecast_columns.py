"""The columns of the tables on the forecast."""

from shardlab.report.cells import RUN, Column, Row, plain, share, words
from shardlab.report.numbers import fixed, rate_text, within


def _predicted(row: Row) -> str:
    return within(row["predicted_ms"], row["low_ms"], row["high_ms"], 1)


def _pays_up_to(row: Row) -> str:
    if row["step"] is None:
        return "every rate" if row["always"] else "none"
    return rate_text(row["step"])


CHECKS = [
    RUN,
    Column("ranks", "", lambda row: str(row["world_size"]), "processes that train together"),
    Column("link", "", words("link"), "how the ranks were joined", False),
    Column(
        "forecast",
        "ms",
        _predicted,
        "step time that the model predicts, with the 95 % interval for a measurement: by the "
        "covariances of its fits and what they leave unexplained",
    ),
    Column(
        "measured step",
        "ms",
        lambda row: fixed(row["measured_ms"], 1),
        "median of the rounds of a timing that the model has not seen",
    ),
    Column("error", "%", share("error"), "forecast over measured step, minus 1"),
    Column(
        "error at own speed",
        "%",
        share("error_of_communication"),
        "the same where the model is told how long a step without communication took in that very "
        "timing: without the drift of the machine",
    ),
]

BREAK_EVEN = [
    RUN,
    Column("codecs", "", words("codec"), "of gradients, and of weights", False),
    Column("payload / raw", "", plain("ratio"), "bytes of a payload over those of float32"),
    Column(
        "alone",
        "up to",
        lambda row: rate_text(row["exposed"]),
        "rate of the link up to which a reduction that nothing hides is faster with the codec",
    ),
    Column(
        "whole step",
        "up to",
        _pays_up_to,
        "the same of the simulated step against that of the strategy without codecs",
    ),
]
