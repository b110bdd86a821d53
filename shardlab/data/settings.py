"""Parameters of the text and its tokens."""

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
"""sources that an option of `Data` is for"""
WITHOUT_PATH = ("wikipedia", "synthetic")
"""sources that read no file of the user"""


class Data(Document):
    """Source of the text."""

    source: Literal[
        "wikipedia", "text", "json", "jsonl", "huggingface", "mediawiki", "synthetic", "tokens"
    ] = "wikipedia"
    """wikipedia: the default corpus, fetched by pip; synthetic: generated text, for quick
    experiments; tokens: those that another program made, as they lie"""
    path: str | None = None
    """file to read (text, json and jsonl: plain, .gz, .bz2 or .zst; mediawiki: .xml or .xml.bz2),
    or its address, http or https, which is downloaded once; text: or a folder of .txt and .md
    files; huggingface: file, folder, or name on the hub; tokens:
    .bin (nanoGPT, llm.c; with .idx Megatron), .ds (datatrove), a folder of them, or a folder that
    `save_to_disk` of datasets wrote"""
    split: str | None = Field(None, pattern=r"^[\w.-]+$")
    """huggingface, tokens of datasets: split to read; null: train. Its documents are split again
    by `validation_share`"""
    text_column: str = Field("text", min_length=1)
    """json, jsonl, huggingface: column, or key of each record, with the text"""
    title_column: str | None = Field(None, min_length=1)
    """json, jsonl, huggingface: column of titles, which every record must have; null: `title`,
    in the records that have one"""
    separator: str | None = Field(None, min_length=1, max_length=1000)
    """text: what is between two documents of a file, such as "\\n\\n" for paragraphs; null:
    <|endoftext|>. A file without it is one document"""
    streaming: bool = True
    """huggingface, from the hub: fetch rows as they are read; false: fetch all files first, and
    keep them for other runs"""
    ids_column: str = Field("input_ids", min_length=1)
    """tokens of datasets: column with the ids; a row is a document"""
    documents: int | None = Field(None, ge=1)
    """number of documents to keep"""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """policy for a record that cannot be read or has no text: an error, or counted and skipped"""
    validation_share: float = Field(0.02, gt=0, lt=1)
    """fraction of the documents in the validation split, chosen by a hash of the title, or of the
    id of a document without one; of tokens the last documents"""

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
            given = getattr(self, key) != type(self).model_fields[key].default
            if given and self.source not in sources:
                raise ValueError(f"{key} is for source {' or '.join(sources)}: remove it")
        return self


_SOURCES = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".xml": "mediawiki",
    ".parquet": "huggingface",
    ".csv": "huggingface",
}


def source_of(path: str) -> str:
    """Return the source of `Data` that reads a file of this name; other files and folders are
    text."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix in _SOURCES]
    return _SOURCES[suffixes[-1]] if suffixes else "text"


_VOCABULARY = 2048
_BYTES = 257
"""tokens of a byte-level tokenizer that has merged nothing: the bytes and the end of text"""


class Tokenize(Document):
    """Tokenizer and token shards."""

    tokenizer: str | None = Field(None, min_length=1)
    """train: a byte-level BPE trained on the training split; gpt2: GPT-2's own; or a path to a
    tokenizer.json or a folder that holds one, or a name on the Hugging Face hub. null: that of
    `model.pretrained`; for other models train"""
    vocabulary: Vocabulary | None = None
    """vocabulary size of a trained tokenizer, at least 257, and 2048 if null; with `end_of_text`
    that of the tokens; null with a given tokenizer"""
    end_of_text: int | None = Field(None, ge=0)
    """data.source tokens, where their tokenizer is not named: id of the token between documents"""
    shards: int = Field(2, ge=1, le=64)
    """files of the training split, built in parallel"""

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
                    "end_of_text is for tokens whose tokenizer is not named: give it with a larger "
                    "vocabulary, and tokenizer null"
                )
        elif self.vocabulary is not None and self.vocabulary < _BYTES:
            raise ValueError(f"vocabulary: a trained tokenizer has at least {_BYTES} tokens")
        return self

    def for_model(self, pretrained: str | None) -> Self:
        """Return the options with the tokenizer and the vocabulary size that null stands for.

        Args:
            pretrained: `model.pretrained`.

        Raises:
            UserError: a vocabulary size for the tokenizer of a pretrained model.
        """
        if self.end_of_text is not None:
            return self
        if pretrained in ("train", "gpt2") and Path(pretrained).is_dir():
            pretrained = (
                f"./{pretrained}"  # the folder, in place of what the word means for a tokenizer
            )
        tokenizer = self.tokenizer or pretrained or "train"
        if tokenizer == "train":
            size = self.vocabulary or _VOCABULARY
            return self.model_copy(update={"tokenizer": tokenizer, "vocabulary": size})
        if self.vocabulary is not None:
            raise UserError(
                "tokenize.vocabulary: model.pretrained brings its own tokenizer: remove it, or set "
                "tokenize.tokenizer to train"
            )
        return self.model_copy(update={"tokenizer": tokenizer})
