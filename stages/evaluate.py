"""Measure how well a trained model, or any Hugging Face model, predicts any text.

No stage of the pipeline: it needs no params.yaml, and may run while a stage does.
"""

import json
from pathlib import Path

import yaml

from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import finite
from shardlab.core.numbers import figure, plural
from shardlab.data.settings import WITHOUT_PATH, Data, source_of
from shardlab.train.text_quality import TextQuality, Windows, find_model, text_quality


def main(model: str, data: str, as_json: bool, **windows: int | None) -> None:
    """Print loss, perplexity and bits per byte.

    Args:
        data: file, folder, address, `wikipedia`, or the section `data` of params.yaml.
    """
    chosen = {key: value for key, value in windows.items() if value is not None}
    settings = validate(Windows, chosen, "evaluate")
    measured = text_quality(find_model(model), _data(data), settings, Path(".work"))
    print(_json(measured) if as_json else _in_words(measured, data))


def _data(text: str) -> Data:
    """Return the source of the text that an option names."""
    try:
        value = yaml.safe_load(text) if text.startswith("{") else text
    except yaml.YAMLError as error:
        raise UserError(f"--data: not YAML: {' '.join(str(error).split())[:150]}") from None
    if isinstance(value, str):
        value = {"source": value} if value in WITHOUT_PATH else {"path": value}
    if "path" in value:
        value = {"source": source_of(str(value["path"])), **value}
    return validate(Data, value, "--data")


def _json(measured: TextQuality) -> str:
    return json.dumps(finite(measured.model_dump()), indent=1)


def _in_words(measured: TextQuality, data: str) -> str:
    bits = f"{figure(measured.bits_per_byte)} bits per byte"
    if measured.altered:
        altered = f"{plural(measured.altered, 'document')} back otherwise"
        bits = f"no bits per byte, since the tokenizer gives {altered}"
    return "\n".join(
        (
            f"{measured.model}: {measured.parameters:,} parameters",
            f"{data}: {plural(measured.documents, 'document')}, {measured.bytes:,} bytes, "
            f"{measured.tokens:,} tokens to predict, in sequences of {measured.length}",
            f"loss {measured.loss:.4f} nats per token, perplexity {figure(measured.perplexity)}, "
            f"{bits}",
        )
    )
