"""Quality of a trained model's predictions of any text."""

from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from shardlab.core.document import Document
from shardlab.core.errors import UserError, shorten
from shardlab.core.types import BatchSize, SequenceLength
from shardlab.data.settings import Data, Tokenize
from shardlab.data.source_records import RecordCounts
from shardlab.data.sources import read_documents
from shardlab.data.text_tokens import TextTokens
from shardlab.data.tokenizer import NUMBERS, TextTokenizer, pretrained_tokenizer
from shardlab.models.pretrained import load_causal, positions_of, refuse_no_model
from shardlab.train.evaluation import evaluate

_LENGTH = 1024
"""longest sequence that nobody asked for: attention takes memory, and a figure gains little"""


class Windows(Document):
    """Sequences of an evaluation."""

    length: SequenceLength | None = None
    """tokens that are predicted per sequence; None: the model's positions, at most 1024"""
    batch: BatchSize = 8
    """sequences per forward pass; it changes no result"""


class TextQuality(Document):
    """Quality of a model's predictions of a text."""

    model: str
    parameters: int
    length: int
    """tokens that were predicted per sequence"""
    documents: int
    bytes: int
    """of UTF-8 text"""
    tokens: int
    """predicted ones: all but the first"""
    loss: float
    """nats per token"""
    perplexity: float
    bits_per_byte: float | None
    """None where the tokenizer loses some of the text"""
    altered: int
    """documents that the tokenizer does not give back"""


def find_model(name: str) -> str:
    """Return the folder of a model, or its name on the hub.

    Args:
        name: either of them, or a run of the experiment: the `final_model` of its seed 0.
    """
    trained = Path("results/train", name, "seed0/final_model")
    return str(trained) if trained.is_dir() and not Path(name).exists() else name


def text_quality(model: str, data: Data, windows: Windows, work: Path) -> TextQuality:
    """Return the quality over every token of a text but its first.

    The text is one row of tokens of the model's own tokenizer, with its end token after each
    document. It is cut into sequences, and the context of a token is what is before it in its own.

    Args:
        model: folder, or name on the hub.
        work: folder for downloads.

    Raises:
        UserError: model or text cannot be read, or they do not fit.
    """
    refuse_no_model(model)
    tokens = _tokens(_tokenizer(model, work), data, work)
    loaded = load_causal(model)
    _refuse_unknown(model, loaded, int(tokens.ids.max()))
    length = _length(model, loaded, windows.length)
    try:
        quality = evaluate(loaded, tokens, length, windows.batch)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        line = shorten(str(error))
        raise UserError(f"out of memory: lower --batch or --length ({line})") from None
    return TextQuality(
        model=model,
        parameters=loaded.num_parameters(),
        length=length,
        documents=tokens.documents,
        bytes=tokens.text_bytes or 0,
        tokens=quality.tokens,
        loss=quality.loss,
        perplexity=quality.perplexity,
        bits_per_byte=quality.bits_per_byte,
        altered=tokens.altered,
    )


def _tokenizer(model: str, work: Path) -> TextTokenizer:
    path = Path(model, "tokenizer.json")
    if Path(model).is_dir() and not path.is_file():
        raise UserError(
            f"{model}: no tokenizer: there is no {path}: copy tokenizer.json and "
            "tokenizer_config.json of the model that it was made from there"
        )
    tokenizer = pretrained_tokenizer(str(Tokenize().for_model(model).tokenizer), work)
    if tokenizer.config.get(NUMBERS):
        raise UserError(
            f"{model}: trained on tokens whose tokenizer nobody named: copy its tokenizer.json and "
            "tokenizer_config.json there"
        )
    return tokenizer


def _tokens(tokenizer: TextTokenizer, data: Data, work: Path) -> TextTokens:
    name = data.path or data.source
    if data.source == "tokens":
        raise UserError(f"{name}: tokens of another program: give the text that they are of")
    documents = read_documents(data, work, RecordCounts(data.bad_records, name))
    tokens = TextTokens(tokenizer, islice(documents, data.documents))
    if len(tokens) < 2:
        raise UserError(f"{name}: no text in it, of which a model could predict a token: give more")
    return tokens


def _refuse_unknown(name: str, model: PreTrainedModel, largest: int) -> None:
    embeddings: Any = model.get_input_embeddings()
    rows = len(embeddings.weight)
    if largest >= rows:
        raise UserError(
            f"{name}: the text has token {largest}, and the model {rows} of them: its "
            "tokenizer.json is of another model: copy that of this one there"
        )


def _length(name: str, model: PreTrainedModel, asked: int | None) -> int:
    positions = positions_of(model)
    if asked is None:
        return min(_LENGTH, positions or _LENGTH)
    if positions is not None and asked > positions:
        raise UserError(f"--length {asked}: {name} has {positions} positions: give at most those")
    return asked
