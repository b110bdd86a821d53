"""The committed JSON Schema is that of the library, and describes what the library accepts."""

import json
import subprocess
import sys

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


def test_every_key_is_described_or_names_itself() -> None:
    """Sections hold only keys of the schema: none is open to keys that nobody checks."""
    schema = json.loads(SCHEMA.read_text())
    described = (part for each in schema["$defs"].values() for part in each.get("anyOf", [each]))
    objects = [part for part in described if part["type"] == "object"]
    assert objects
    assert all(d["additionalProperties"] is False for d in [schema, *objects])
