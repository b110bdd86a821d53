"""Tokens of a split, read from memory-mapped shards as one long array, and their manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, StringConstraints

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, sha256_of_file

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


class TokenSplit:
    """Tokens of `train` or `validation`, with shards in the order of the corpus."""

    def __init__(self, folder: Path, split: Literal["train", "validation"]) -> None:
        manifest = read_manifest(folder)
        self.name = split
        self.vocabulary = manifest.vocabulary
        """embedding rows needed"""
        self.end_of_text = manifest.end_of_text
        """id of the token after each document"""
        self._folder = folder
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._shards: list[Shard] = getattr(manifest, split)
        self.documents = sum(shard.documents for shard in self._shards)
        self.text_bytes = sum(shard.bytes for shard in self._shards)
        """UTF-8 bytes of all documents, titles included: the divisor of bits per byte"""
        self._arrays = [self._open(shard) for shard in self._shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)])

    def __len__(self) -> int:
        """Number of tokens, end tokens included."""
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64.

        Raises:
            IndexError: the range is not inside the split.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}..{start + count} of {len(self)} in {self.name}")
        out = np.empty(count, np.int64)
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < count:
            offset = start + filled - int(self._starts[shard])
            part = self._arrays[shard][offset : offset + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the shards as stored, little-endian uint16 or uint32."""
        yield from self._arrays

    def verify(self) -> None:
        """Read every shard and compare its checksum.

        Raises:
            UserError: a shard whose bytes are not those that were written.
        """
        for shard in self._shards:
            if sha256_of_file(self._folder / shard.file) != shard.sha256:
                raise self._damaged(shard, "its checksum differs from the manifest's")

    def _open(self, shard: Shard) -> np.ndarray:
        path = self._folder / shard.file
        expected = shard.tokens * self._dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise self._damaged(shard, "it is missing")
        if size != expected:
            raise self._damaged(shard, f"{size} bytes where the manifest says {expected}")
        if not size:
            return np.empty(0, self._dtype)  # an empty file cannot be mapped
        return np.memmap(path, self._dtype, mode="r")

    def _damaged(self, shard: Shard, reason: str) -> UserError:
        return UserError(
            f"{self._folder / shard.file}: damaged ({reason}); "
            f"remove {self._folder} and make it again: python -m stages.tokenize"
        )


def open_split(folder: str | Path, split: Literal["train", "validation"]) -> TokenSplit:
    """Open a split of a folder that `build_tokens` wrote; checks sizes, and `verify` checksums.

    Raises:
        UserError: no manifest, or a shard that is missing or has another size.
    """
    return TokenSplit(Path(folder), split)
