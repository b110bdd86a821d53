"""Tokens of a split, read from memory-mapped shards as one array, and their manifest."""

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
    """One file of little-endian tokens without a header.

    It holds complete documents, each with an end token.
    """

    file: Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)?\.bin$")]
    tokens: int = Field(ge=0, lt=2**48)
    documents: int = Field(ge=0, lt=2**48)
    bytes: int = Field(ge=0, lt=2**48)
    """Bytes of the UTF-8 text: title, newline, text."""
    altered: int = Field(0, ge=0, lt=2**48)
    """Documents whose tokens do not decode to their text."""
    sha256: Sha256

    def arrays(self, folder: Path, dtype: str) -> list[np.ndarray]:
        """Map the tokens.

        Raises:
            UserError: The file is missing or has a different size.
        """
        path = folder / self.file
        expected = self.tokens * np.dtype(dtype).itemsize
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise self._damaged(folder, "it is missing")
        if size != expected:
            raise self._damaged(folder, f"{size} bytes, but the manifest says {expected}")
        return map_ranges(path, dtype, [[0, self.tokens]] if self.tokens else [])

    def verify(self, folder: Path, dtype: str, vocabulary: int) -> None:
        """Compare the checksum, and the largest token with the vocabulary.

        Raises:
            UserError: The file changed since it was written.
        """
        refuse_damage(folder, {self.file: self.sha256}, _fix(folder))
        largest = max((int(array.max()) for array in self.arrays(folder, dtype)), default=0)
        if largest >= vocabulary:
            raise self._damaged(folder, f"token {largest} of {vocabulary}")

    def _damaged(self, folder: Path, reason: str) -> UserError:
        return UserError(f"{folder / self.file}: damaged ({reason}): {_fix(folder)}")


class Manifest(Document):
    """Shards of both splits, in the order of the corpus, or parts of files of other programs."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"] | None
    """Type of the tokens in shards; None: each file of another program has its own type."""
    vocabulary: int = Field(ge=1, le=2**31)
    """Embedding rows that a model needs."""
    end_of_text: int = Field(ge=0)
    """Id of the token between documents."""
    end_of_text_token: str
    """Text of that token."""
    corpus_sha256: Sha256
    tokenizer_sha256: Sha256
    train: list[Shard] | list[TokenFile]
    validation: list[Shard] | list[TokenFile]
    parameters: dict[str, Any] = {}
    """Parameters that the tokens depend on, by dotted keys of params.yaml."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    path = folder / MANIFEST
    return Manifest.from_file(path, _fix(folder) if path.exists() else "run shardlab tokenize")


class Tokens(Protocol):
    """Tokens of a text, as one array."""

    text_bytes: int | None
    """UTF-8 bytes of all documents with titles; None if another program made the tokens."""
    altered: int
    """Documents whose tokens do not decode to their text."""

    def __len__(self) -> int:
        """Return the number of tokens, end tokens included."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64."""


class FirstTokens:
    """Tokens at the beginning of a text; the bytes of their text are unknown.

    Args:
        count: Number of tokens; a shorter text is not padded.
    """

    text_bytes: int | None = None
    altered = 0

    def __init__(self, text: Tokens, count: int) -> None:
        self._text, self._count = text, min(count, len(text))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._count

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64."""
        return self._text.read(start, count)


class TokenSplit:
    """Tokens of the `train` or `validation` split, in the order of the corpus."""

    def __init__(self, folder: Path, split: Literal["train", "validation"], share: slice) -> None:
        manifest = read_manifest(folder)
        self.name = split
        self.vocabulary = manifest.vocabulary
        """Embedding rows that a model needs."""
        self.end_of_text = manifest.end_of_text
        """Id of the token between documents."""
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        dtype = manifest.dtype or "uint16"
        shards: list[Shard] | list[TokenFile] = getattr(manifest, split)
        self.documents = sum(shard.documents for shard in shards)
        sizes = [shard.bytes for shard in shards if shard.bytes is not None]
        self.text_bytes = sum(sizes) if len(sizes) == len(shards) else None
        """UTF-8 bytes of all documents with titles, the divisor of bits per byte; None if another
        program made the tokens."""
        self.altered = sum(shard.altered for shard in shards)
        """Documents whose tokens do not decode to their text, since the tokenizer lacks or changes
        characters. A model does not predict the bytes of these documents."""
        self._arrays = [array for shard in shards for array in shard.arrays(folder, dtype)]
        self._starts = np.cumsum([0, *map(len, self._arrays)])
        for shard in shards[share]:
            shard.verify(folder, dtype, self.vocabulary)

    def __len__(self) -> int:
        """Return the number of tokens, end tokens included."""
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64.

        Raises:
            IndexError: The range exceeds the split.
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
        """Yield the shards, or the ranges of files, as stored: little-endian integers."""
        yield from self._arrays


def open_split(
    folder: str | Path, split: Literal["train", "validation"], share: slice = slice(None)
) -> TokenSplit:
    """Open a split of a folder that `build_tokens` or `map_tokens` wrote, and verify it.

    Args:
        share: Shards whose checksums are verified, so that each rank can verify a part.

    Raises:
        UserError: The manifest or a shard is missing, or a shard changed since it was written.
    """
    return TokenSplit(Path(folder), split, share)


def _fix(folder: Path) -> str:
    return f"remove {folder} and run shardlab tokenize"
