"""Tokens of a split, read from memory-mapped shards as one long array, and their manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, StringConstraints

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import refuse_damage
from shardlab.data.token_files import TokenFile, map_ranges

MANIFEST = "manifest.json"
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Shard(Document):
    """One file of tokens without a header: little-endian, whole documents, each with its end."""

    file: Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)?\.bin$")]
    tokens: int = Field(ge=0, lt=2**48)
    documents: int = Field(ge=0, lt=2**48)
    bytes: int = Field(ge=0, lt=2**48)
    """of UTF-8 text: title, newline, text"""
    altered: int = Field(0, ge=0, lt=2**48)
    """documents whose text the tokens do not give back"""
    sha256: Sha256

    def arrays(self, folder: Path, dtype: str) -> list[np.ndarray]:
        """Map the tokens.

        Raises:
            UserError: the file is missing or has another size.
        """
        path = folder / self.file
        expected = self.tokens * np.dtype(dtype).itemsize
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise self._damaged(folder, "it is missing")
        if size != expected:
            raise self._damaged(folder, f"{size} bytes where the manifest says {expected}")
        return map_ranges(path, dtype, [[0, self.tokens]] if self.tokens else [])

    def verify(self, folder: Path, dtype: str, vocabulary: int) -> None:
        """Compare the checksum, and the largest token with the vocabulary.

        Raises:
            UserError: the file is not as it was written.
        """
        refuse_damage(folder, {self.file: self.sha256}, _fix(folder))
        largest = max((int(array.max()) for array in self.arrays(folder, dtype)), default=0)
        if largest >= vocabulary:
            raise self._damaged(folder, f"token {largest} of {vocabulary}")

    def _damaged(self, folder: Path, reason: str) -> UserError:
        return UserError(f"{folder / self.file}: damaged ({reason}): {_fix(folder)}")


class Manifest(Document):
    """Shards of both splits, in the order of the corpus; or parts of files of other programs."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"] | None
    """of shards; None: files of other programs have their own"""
    vocabulary: int = Field(ge=1, le=2**31)
    """embedding rows needed"""
    end_of_text: int = Field(ge=0)
    """id of the token between documents"""
    end_of_text_token: str
    corpus_sha256: Sha256
    tokenizer_sha256: Sha256
    train: list[Shard] | list[TokenFile]
    validation: list[Shard] | list[TokenFile]
    parameters: dict[str, Any] = {}
    """dotted keys of params.yaml that the tokens were made by, with their values"""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path, make = folder / MANIFEST, "run shardlab tokenize"
    return Manifest.from_file(path, _fix(folder) if path.exists() else make)


class Tokens(Protocol):
    """A text's tokens, as one long array."""

    text_bytes: int | None
    """UTF-8 bytes of all documents, titles included; None where another program read the text"""
    altered: int
    """documents whose text the tokens do not give back"""

    def __len__(self) -> int:
        """Number of tokens, end tokens included."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64."""


class FirstTokens:
    """Tokens at the beginning of a text, whose bytes nobody knows.

    Args:
        count: all tokens where the text has fewer.
    """

    text_bytes: int | None = None
    altered = 0

    def __init__(self, text: Tokens, count: int) -> None:
        self._text, self._count = text, min(count, len(text))

    def __len__(self) -> int:
        """Number of tokens."""
        return self._count

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64."""
        return self._text.read(start, count)


class TokenSplit:
    """Tokens of `train` or `validation`, with shards in the order of the corpus."""

    def __init__(self, folder: Path, split: Literal["train", "validation"], share: slice) -> None:
        manifest = read_manifest(folder)
        self.name = split
        self.vocabulary = manifest.vocabulary
        """embedding rows needed"""
        self.end_of_text = manifest.end_of_text
        """id of the token between documents"""
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        dtype = manifest.dtype or "uint16"
        shards: list[Shard] | list[TokenFile] = getattr(manifest, split)
        self.documents = sum(shard.documents for shard in shards)
        sizes = [shard.bytes for shard in shards if shard.bytes is not None]
        self.text_bytes = sum(sizes) if len(sizes) == len(shards) else None
        """UTF-8 bytes of all documents, titles included: the divisor of bits per byte; None where
        another program read the text"""
        self.altered = sum(shard.altered for shard in shards)
        """documents whose text the tokens do not give back, since the tokenizer lacks or changes
        characters; their bytes are not what a model predicts"""
        self._arrays = [array for shard in shards for array in shard.arrays(folder, dtype)]
        self._starts = np.cumsum([0, *map(len, self._arrays)])
        for shard in shards[share]:
            shard.verify(folder, dtype, self.vocabulary)

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
        """Yield the shards, or the stretches of files, as stored: little-endian whole numbers."""
        yield from self._arrays


def open_split(
    folder: str | Path, split: Literal["train", "validation"], share: slice = slice(None)
) -> TokenSplit:
    """Open a split of a folder that `build_tokens` or `map_tokens` wrote, and verify it.

    Args:
        share: of the shards, whose checksums are compared, so that ranks can do it together.

    Raises:
        UserError: no manifest, or a shard that is missing or is not as it was written.
    """
    return TokenSplit(Path(folder), split, share)


def _fix(folder: Path) -> str:
    return f"remove {folder} and run shardlab tokenize"
