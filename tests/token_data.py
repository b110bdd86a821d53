"""Makes token shards to train on."""

from pathlib import Path

from shardlab.core.files import write_json
from shardlab.data.sources.corpus import prepare
from shardlab.data.tokenize.tokenize import build_tokens
from shardlab.experiment.schema import Data, Tokenize


def make_token_data(folder: Path) -> Path:
    source = prepare(Data(source="synthetic", documents=120), folder / "corpus.json", folder)
    write_json(folder / "source.json", source)
    options = Tokenize(vocabulary=300, shards=1)
    build_tokens(folder / "corpus.json", 0.1, options, folder / "work", folder)
    return folder
