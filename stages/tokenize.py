"""Build the tokenizer, the token shards and their statistics from the corpus."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.data.statistics import describe_tokens
from shardlab.data.tokenize import build_tokens
from shardlab.data.tokens import open_split
from stages.common import refuse_other_source, require, run, token_parameters


def main(params: Parameters) -> None:
    """Write the tokenizer of two files, data/tokens/ and data/statistics.json."""
    data, model, options = params("data", "model", "tokenize")
    out = Path("data")
    require(out / "corpus.json", "prepare")
    refuse_other_source(params)
    build_tokens(
        out / "corpus.json",
        validation_share=data.validation_share,
        options=options.for_model(model),
        work=Path(".work"),
        out=out,
        parameters=token_parameters(params),
    )
    statistics = describe_tokens(
        open_split(out / "tokens", "train"), open_split(out / "tokens", "validation")
    )
    write_json(out / "statistics.json", statistics)
    train, validation = statistics["train"], statistics["validation"]
    say(
        f"tokenize: {train['tokens']} tokens for training, {validation['tokens']} for validation, "
        f"{train['bytes_per_token']:.2f} bytes per token, vocabulary {statistics['vocabulary']}"
    )
    if altered := statistics["altered_documents"]:
        say(
            f"tokenize: {altered} of {train['documents'] + validation['documents']} documents lose "
            "or change characters in this tokenizer: their bits per byte would be wrong, so that "
            "validation of a split with such documents leaves them out"
        )


if __name__ == "__main__":
    run(main)
