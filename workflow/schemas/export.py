"""Writes the JSON Schema of params.yaml, for editors: python workflow/schemas/export.py"""

import json
from pathlib import Path

from shardlab.config.experiment import Params
from shardlab.core.files import write_text

TARGET = Path(__file__).with_name("params.schema.json")


def schema() -> str:
    """The schema as it is committed; tests/pipeline/test_schema.py compares."""
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Params.model_json_schema(),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_text(TARGET, schema())
