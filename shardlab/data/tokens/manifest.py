"""Manifest of a folder of token shards; written last, so that a folder with one is complete."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
MANIFEST = "manifest.json"


class Shard(Document):
    """One file of tokens without a header: little-endian, whole documents, each with its end."""

    file: Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)?\.bin$")]
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    bytes: int = Field(ge=0)
    """of UTF-8 text: title, newline, text"""
    sha256: Sha256


class Manifest(Document):
    """Shards of both splits, in the order of the corpus."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocabulary: int = Field(ge=1)
    """embedding rows needed"""
    end_of_text: int = Field(ge=0)
    """id of the token after each document"""
    end_of_text_token: str
    corpus_sha256: Sha256
    tokenizer_sha256: Sha256
    recipe_sha256: Sha256
    """hash of the corpus and of every option that the tokens depend on"""
    train: list[Shard]
    validation: list[Shard]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; to be called when all shards are in place."""
    write_json(folder / MANIFEST, manifest.model_dump())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({type(error).__name__}); make it: python -m stages.tokenize"
        ) from None
    return validate(Manifest, value, str(path))
