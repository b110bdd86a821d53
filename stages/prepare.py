"""Convert the text of any source into one JSON array of documents."""

from pathlib import Path

from shardlab.core.files import write_json
from shardlab.core.progress import say
from shardlab.data.settings import Data
from shardlab.data.sources import prepare
from stages.common import source_parameters
from stages.sections import Sections


def main(params: Sections) -> None:
    """Write data/corpus.json, and data/source.json with source, licence and counts."""
    # the split is made of tokens
    data = params("data", Data, *(Data.model_fields.keys() - {"validation_share"}))
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
