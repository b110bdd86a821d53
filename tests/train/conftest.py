"""Tokens to train on."""

from pathlib import Path

import pytest

from shardlab.core.files import write_json
from shardlab.core.params import Data, Tokenize
from shardlab.data.corpus import prepare
from shardlab.data.tokenize import build_tokens


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    source = prepare(Data(source="synthetic", documents=120), folder / "corpus.json", folder)
    write_json(folder / "source.json", source)
    options = Tokenize(vocabulary=300, shards=1)
    build_tokens(folder / "corpus.json", 0.1, options, folder / "work", folder)
    return folder
