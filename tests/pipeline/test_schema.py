"""The committed JSON Schema is that of the library, and describes what the library accepts."""

import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import yaml

from tests.pipeline.workspace import ROOT

SCHEMA = ROOT / "workflow/schemas/params.schema.json"


def test_the_committed_schema_is_current() -> None:
    script = "import runpy; print(runpy.run_path('workflow/schemas/export.py')['schema'](), end='')"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == SCHEMA.read_text(), "run: python workflow/schemas/export.py"


@pytest.mark.parametrize(
    "name",
    [
        "params.yaml",
        *(f"params/{name}.yaml" for name in ("quick", "codecs", "links", "gpu")),
    ],
)
def test_schema_accepts_the_params_files(name: str) -> None:
    jsonschema.validate(yaml.safe_load((ROOT / name).read_text()), json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("key, value", [("stepz", 5), ("steps", "5"), ("steps", 1)])
def test_schema_refuses_invalid_params(key: str, value: object) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["train"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(params, json.loads(SCHEMA.read_text()))


def sections() -> dict[str, dict[str, Any]]:
    """The schemas of all mappings with fixed keys, by name; that of the file is `params`."""
    schema = json.loads(SCHEMA.read_text())
    parts = {
        name: part
        for name, definition in schema["$defs"].items()
        for part in definition.get("anyOf", [definition])
        if part["type"] == "object"
    }
    assert parts
    return {"params": schema, **parts}


def test_no_section_is_open_to_keys_that_nobody_checks() -> None:
    assert [n for n, part in sections().items() if part["additionalProperties"] is not False] == []


def test_every_key_is_described() -> None:
    """By its own description, by that of the section that it holds, or as the name of a codec."""
    definitions = json.loads(SCHEMA.read_text())["$defs"]

    def is_described(key: dict[str, Any]) -> bool:
        section = definitions.get(key.get("$ref", "").rpartition("/")[-1], {})
        return bool(key.get("description") or section.get("description") or "const" in key)

    keys = {
        f"{name}.{key}": value
        for name, part in sections().items()
        for key, value in part["properties"].items()
    }
    assert [name for name, key in keys.items() if not is_described(key)] == []
