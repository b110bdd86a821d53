"""Build the tokenizer, the token shards and their statistics from the corpus."""

from pathlib import Path

from shardlab.core.files import read_json, write_json
from shardlab.core.progress import say
from shardlab.data.mapped_tokens import map_tokens
from shardlab.data.settings import Data, Tokenize
from shardlab.data.statistics import describe_tokens
from shardlab.data.tokenize import build_tokens
from shardlab.data.tokens import open_split
from stages.common import refuse_other_source, require, token_parameters
from stages.sections import Sections


def main(params: Sections) -> None:
    """Write the tokenizer of two files, data/tokens/ and data/statistics.json."""
    data, options = params("data", Data), params("tokenize", Tokenize)
    out = Path("data")
    require(out / "corpus.json", "prepare")
    refuse_other_source(params)
    work, parameters = Path(".work"), token_parameters(params)
    lengths = None
    if data.source == "tokens":
        files = read_json(out / "source.json")["files"]
        lengths = map_tokens(data, options, files, work, out, parameters)
    else:
        share = data.validation_share
        build_tokens(out / "corpus.json", share, options, work, out, parameters)
    statistics = describe_tokens(
        open_split(out / "tokens", "train"), open_split(out / "tokens", "validation"), lengths
    )
    write_json(out / "statistics.json", statistics)
    train, validation = statistics["train"], statistics["validation"]
    ratio = train["bytes_per_token"]
    density = "" if ratio is None else f"{ratio:.2f} bytes per token, "
    say(
        f"tokenize: {train['tokens']} tokens for training, {validation['tokens']} for validation, "
        f"{density}vocabulary {statistics['vocabulary']}"
    )
    if altered := statistics["altered_documents"]:
        say(
            f"tokenize: {altered} of {train['documents'] + validation['documents']} documents lose "
            "or change characters in this tokenizer: their bits per byte would be wrong, so that "
            "validation of a split with such documents leaves them out"
        )
