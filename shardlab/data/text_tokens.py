"""Tokens of a text, held in memory."""

from collections.abc import Iterable

import numpy as np

from shardlab.data.corpus_file import CorpusDocument
from shardlab.data.tokenize import encode_documents
from shardlab.data.tokenizer import TextTokenizer


class TextTokens:
    """Tokens of documents in order, each followed by the end token, as in shards.

    Raises:
        UserError: Plain text becomes the end token.
    """

    def __init__(self, tokenizer: TextTokenizer, documents: Iterable[CorpusDocument]) -> None:
        self.documents = self.altered = size = 0
        parts = [np.empty(0, np.int32)]
        for batch in encode_documents(tokenizer, documents):
            parts.append(np.array(batch.ids, np.int32))
            self.documents += batch.documents
            self.altered += batch.altered
            size += batch.bytes
        self.text_bytes: int | None = size
        self.ids = np.concatenate(parts)

    def __len__(self) -> int:
        """Return the number of tokens, end tokens included."""
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count - 1`, shape `[count]`, int64."""
        return self.ids[start : start + count].astype(np.int64)
