"""Each place that a codec, an engine, a setting, a source or a figure needs, in the order of
docs/CONTRIBUTING.md.

A place that is missing is named with what to do there. Whether what stands there is right, the laws
test, which run for all codecs and engines by themselves.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple, get_args

import pytest
import yaml

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.config.parameters import Parameters
from shardlab.data.settings import WITHOUT_PATH, Data
from shardlab.data.sources import READERS
from shardlab.engines.base import Engine
from shardlab.report import plots
from shardlab.report.tables import figures_of
from shardlab.report.write import report_sections
from shardlab.strategy.codec_table import BUILT_IN, split_text
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.strategy.engine_traits import ENGINES, EngineName, inapplicable
from tests.codecs.golden_payloads import path as golden
from tests.data.test_sources import EXAMPLES
from tests.evidence_factory import make_evidence
from tests.pipeline.workspace import ROOT
from tests.record_factory import make_records
from tests.strategy.drawn_strategies import VALUES


class Place(NamedTuple):
    """A file or folder that a thing needs."""

    path: str
    has: Callable[[str], Any]
    """whether it has what the thing of this name needs"""
    do: str


def text(path: str) -> str:
    file = ROOT / path
    return file.read_text() if file.exists() else ""


SCHEMA = json.loads(text("workflow/schemas/params.schema.json"))["$defs"]


def made_by(factory: object, *kinds: type) -> bool:
    """True for a class of one of these kinds, or the name of one."""
    try:
        found = resolve_name(factory) if isinstance(factory, str) else factory
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, kinds)


def in_enum(document: str, key: str) -> Callable[[str], bool]:
    return lambda name: name in SCHEMA[document]["properties"][key]["enum"]


def examples_of(codec: str) -> tuple[str, ...]:
    """Examples of this codec, where all of them are."""
    examples = BUILT_IN[codec].examples if codec in BUILT_IN else ()
    return examples if {split_text(each)["name"] for each in examples} == {codec} else ()


def is_a_wire_format(codec: str) -> bool:
    page = text("docs/wire-formats.md")
    row = re.search(rf"^\| `{codec}[`:]", page, re.M)
    multi_phase = codec in BUILT_IN and BUILT_IN[codec].multi_phase
    return bool((row or multi_phase) and re.search(rf"^\*\*{codec}\b|`{codec}`", page, re.M))


def is_golden(codec: str) -> bool:
    examples = examples_of(codec)
    return bool(examples) and (
        BUILT_IN[codec].multi_phase or all(golden(each).exists() for each in examples)
    )


def is_in_the_matrix(codec: str) -> bool:
    strategies = Parameters(ROOT / "params/codecs.yaml")("strategies").values()
    return codec in {strategy.gradients.codec.name for strategy in strategies}


def rows_of_settings(engine: str) -> list[str]:
    """The settings that the table says this engine has."""
    page = text("docs/strategies.md")
    rows = re.findall(r"^\| `(\w+)` \| ([^|\n]*) \|(?:[^|\n]*\|){3}$", page, re.M)
    return sorted(key for key, of in rows if of.startswith("all") != (f"`{engine}`" in of))


def is_a_row_of_strategies(engine: str) -> bool:
    if f"| [`{engine}`](engines/{engine}.md) |" not in text("docs/strategies.md"):
        return False
    refused = set() if ENGINES[engine].compiles else {"compile"}
    settings = {*Strategy.model_fields} - inapplicable(engine) - refused - {"engine"}
    return rows_of_settings(engine) == sorted(settings)


@cache
def drawn_figures() -> set[str]:
    """Figures that the evidence of the tests shows."""
    sections = report_sections(make_evidence(make_records()))
    return {figure.name for figure in figures_of(sections) if not figure.empty}


SOURCES = get_args(Data.model_fields["source"].annotation)
EXPORT = "run python workflow/schemas/export.py"
SCHEMA_FILE = "workflow/schemas/params.schema.json"
PLACES: dict[str, list[Place]] = {
    "codec": [
        Place(
            "shardlab/strategy/codec_options.py",
            examples_of,
            "add a class with that name and `examples`, specs of it that the tests run",
        ),
        Place(
            "shardlab/codecs",
            lambda name: (
                name in BUILT_IN and made_by(BUILT_IN[name].factory, Codec, MultiPhaseMethod)
            ),
            "add the class that `factory` of the specification names",
        ),
        Place(
            SCHEMA_FILE,
            lambda name: any(
                each.get("properties", {}).get("name", {}).get("const") == name
                for each in SCHEMA.values()
            ),
            EXPORT,
        ),
        Place(
            "docs/codecs.md",
            lambda name: f"| `{name}` |" in text("docs/codecs.md"),
            "add a row with the options",
        ),
        Place(
            "docs/wire-formats.md",
            is_a_wire_format,
            "add a row with the bytes, and a paragraph that begins with the name in bold",
        ),
        Place(
            "tests/codecs/golden/",
            is_golden,
            "once tests/codecs/test_codec_laws.py passes, run "
            "python -m tests.codecs.golden_payloads",
        ),
        Place("params/codecs.yaml", is_in_the_matrix, "add a strategy with it"),
    ],
    "engine": [
        Place(
            "shardlab/strategy/engine_traits.py",
            lambda name: name in ENGINES and name in get_args(EngineName),
            "add it to `EngineName`, and a row to `ENGINES`",
        ),
        Place(
            "shardlab/engines",
            lambda name: name in ENGINES and made_by(ENGINES[name].factory, Engine),
            "add the class that `factory` of the row names, derived from `Engine`",
        ),
        Place(
            "shardlab/strategy/settings.py",
            lambda name: name in ENGINES and ENGINES[name].settings <= {*Strategy.model_fields},
            "add a field with a docstring for each of its settings",
        ),
        Place(
            "tests/strategy/drawn_strategies.py",
            lambda name: name in ENGINES and ENGINES[name].settings - {"sync"} <= VALUES.keys(),
            "add values of each of its settings to `VALUES`",
        ),
        Place(SCHEMA_FILE, in_enum("Strategy", "engine"), EXPORT),
        Place(
            "docs/engines/NAME.md",
            lambda name: text(f"docs/engines/{name}.md").startswith(f"# Engine `{name}`\n"),
            "add the page, which begins with # Engine `NAME`",
        ),
        Place(
            "docs/strategies.md",
            is_a_row_of_strategies,
            "add a row that links the page, and its name in the rows of the settings that it has",
        ),
    ],
    "setting to an existing engine": [
        Place(
            "shardlab/strategy/settings.py",
            lambda name: name in Strategy.model_fields,
            "add a field with a docstring",
        ),
        Place(
            "shardlab/strategy/engine_traits.py",
            lambda name: any(name in traits.settings for traits in ENGINES.values()),
            "add it to the settings of the engines that have it",
        ),
        Place(
            "tests/strategy/drawn_strategies.py",
            lambda name: name in VALUES or name == "sync",
            "add values of it to `VALUES`",
        ),
        Place(SCHEMA_FILE, lambda name: name in SCHEMA["Strategy"]["properties"], EXPORT),
        Place(
            "docs/strategies.md",
            lambda name: re.search(rf"^\| `{name}` \|", text("docs/strategies.md"), re.M),
            "add a row to the table of settings",
        ),
    ],
    "data source": [
        Place(
            "shardlab/data/settings.py",
            lambda name: name in SOURCES,
            "add it to `Data.source`",
        ),
        Place(
            "shardlab/data/sources.py",
            lambda name: name in READERS,
            "add what reads it to `READERS`",
        ),
        Place(SCHEMA_FILE, in_enum("Data", "source"), EXPORT),
        Place(
            "tests/data/test_sources.py",
            lambda name: name in EXAMPLES or name in WITHOUT_PATH,
            "add a file with a bad record to `EXAMPLES`",
        ),
        Place(
            "docs/how-to/text.md",
            lambda name: f"| `{name}` |" in text("docs/how-to/text.md"),
            "add a row to the table of sources",
        ),
    ],
    "figure": [
        Place(
            "shardlab/report/plots.py",
            lambda name: hasattr(plots, name),
            "add a function NAME_plot that draws it",
        ),
        Place(
            "shardlab/report/sections",
            lambda name: name.removesuffix("_plot") in drawn_figures(),
            "add `Figure(NAME, ...)` to a section of `SECTIONS`, and evidence of the tests that "
            "it shows to tests/evidence_factory.py",
        ),
    ],
}
OF_ALL_ENGINES = {
    *("engine", "overrides", "param_dtype", "activation_checkpointing", "activations"),
    *("compile", "accumulation", "gradients"),
}
"""settings that no row of `ENGINES` names"""
NAMES = {
    "codec": [*BUILT_IN],
    "engine": [*{*ENGINES} | {*get_args(EngineName)}],
    "setting to an existing engine": sorted({*Strategy.model_fields} - OF_ALL_ENGINES),
    # tokens that exist are no text: shardlab/data/token_files.py maps them
    "data source": [*({*SOURCES} | {*READERS}) - {"tokens"}],
    # the chart above the sections is the answer's
    "figure": sorted(
        {n for n in vars(plots) if n.endswith("_plot") and n != "crossover_plot"}
        | {f"{name}_plot" for name in drawn_figures()}
    ),
}


def missing(kind: str, name: str) -> list[str]:
    """Return a line for each place that a thing lacks."""
    return [
        f"{kind} {name}: missing in {place.path.replace('NAME', name)}: {place.do}"
        for place in PLACES[kind]
        if not place.has(name)
    ]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in sorted(names)]
)
def test_nothing_is_missing(kind: str, name: str) -> None:
    found = missing(kind, name)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("setting", "default"),
    re.findall(
        r"^\| `(\w+)` \|[^|\n]*\|[^|\n]*\| `?((?<=`)\w+(?=`)|\d+)`? \|",
        text("docs/strategies.md"),
        re.M,
    ),
)
def test_a_default_that_the_page_states_has_the_hash_of_leaving_it_out(
    setting: str, default: str
) -> None:
    for engine in ENGINES:
        if setting not in inapplicable(engine):
            written = {"engine": engine, setting: yaml.safe_load(default)}
            assert parse_strategy(written).hash() == parse_strategy({"engine": engine}).hash()


@pytest.mark.parametrize("kind", PLACES)
def test_what_exists_nowhere_is_missing_everywhere(kind: str) -> None:
    assert len(missing(kind, "nosuch")) == len(PLACES[kind])


@pytest.mark.parametrize("kind", PLACES)
def test_the_page_lists_these_places_in_this_order(kind: str) -> None:
    page = text("docs/CONTRIBUTING.md")
    heading = rf"^###? (?:Add an?|A built-in) {kind}\b"
    sections = re.findall(rf"{heading}.*?(?=^##|\Z)", page, re.M | re.S)
    listed = re.findall(r"^\d\. `([^`]+)`", "".join(sections), re.M)
    assert listed == [place.path for place in PLACES[kind]]
