"""Convert the text of any source into one JSON array of documents."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.data.settings import Data
from shardlab.data.sources import prepare
from stages.common import run, source_parameters


def main(params: Parameters) -> None:
    """Write data/corpus.json, and data/source.json with source, licence and counts."""
    # the split is made of tokens
    unsplit = {"validation_share": Data.model_fields["validation_share"].default}
    data = params("data").model_copy(update=unsplit)
    source = prepare(data, Path("data/corpus.json"), Path(".work"))
    write_json("data/source.json", {**source, "parameters": source_parameters(params)})
    if data.source == "tokens":
        size = sum(Path(file["path"]).stat().st_size for file in source["files"])
        say(f"prepare: {len(source['files'])} files of tokens, {size / 1e6:.2f} MB, as they lie")
        return
    say(
        f"prepare: {source['documents']} documents, {source['bytes'] / 1e6:.2f} MB of text "
        f"from {source['name']}, {source['bad_records']['count']} bad records"
    )


if __name__ == "__main__":
    run("prepare", main)
