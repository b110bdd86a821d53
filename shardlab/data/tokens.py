"""Tokens of a split, read from memory-mapped shards as one long array, and their manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StringConstraints

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import refuse_damage
from shardlab.data.token_files import Sha256, TokenFile

MANIFEST = "manifest.json"


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
    path, make = folder / MANIFEST, "run python -m stages.tokenize"
    return Manifest.from_file(path, _fix(folder) if path.exists() else make)


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
        self._folder = folder
        self._dtype = np.dtype(manifest.dtype or "uint16").newbyteorder("<")
        self._shards: list[Shard] | list[TokenFile] = getattr(manifest, split)
        self.documents = sum(shard.documents for shard in self._shards)
        sizes = [shard.bytes for shard in self._shards if shard.bytes is not None]
        self.text_bytes = sum(sizes) if len(sizes) == len(self._shards) else None
        """UTF-8 bytes of all documents, titles included: the divisor of bits per byte; None where
        another program read the text"""
        self.altered = sum(shard.altered for shard in self._shards)
        """documents whose text the tokens do not give back, since the tokenizer lacks or changes
        characters; their bytes are not what a model predicts"""
        self._arrays = [array for shard in self._shards for array in self._open(shard)]
        self._starts = np.cumsum([0, *map(len, self._arrays)])
        self._verify(share)

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

    def _verify(self, share: slice) -> None:
        """Compare the checksums of some shards, and their largest token with the vocabulary; of
        files of other programs, whose tokens were compared once, what they were."""
        for shard in self._shards[share]:
            if isinstance(shard, TokenFile):
                shard.identity.refuse_change(Path(shard.path))
                continue
            refuse_damage(self._folder, {shard.file: shard.sha256}, _fix(self._folder))
            largest = max(int(array.max(initial=0)) for array in self._open(shard))
            if largest >= self.vocabulary:
                raise self._damaged(shard, f"token {largest} of {self.vocabulary}")

    def _open(self, shard: Shard | TokenFile) -> list[np.ndarray]:
        if isinstance(shard, TokenFile):
            return shard.arrays()
        path = self._folder / shard.file
        expected = shard.tokens * self._dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise self._damaged(shard, "it is missing")
        if size != expected:
            raise self._damaged(shard, f"{size} bytes where the manifest says {expected}")
        if not size:
            return [np.empty(0, self._dtype)]  # an empty file cannot be mapped
        return [np.memmap(path, self._dtype, mode="r")]

    def _damaged(self, shard: Shard, reason: str) -> UserError:
        return UserError(f"{self._folder / shard.file}: damaged ({reason}): {_fix(self._folder)}")


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
    return f"remove {folder} and run python -m stages.tokenize"
