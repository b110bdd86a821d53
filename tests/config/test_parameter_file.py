"""Files that are no parameters end in one line, whatever is in them.

`pytest --hypothesis-profile exhaustive tests/config/test_parameter_file.py` tries 100,000.
"""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from tests.pipeline.workspace import ROOT

TEXT = (ROOT / "params.yaml").read_text()
TREE = yaml.safe_load(TEXT)
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
) | st.sampled_from(
    [10**9, 10**30, -1, 0, 1e308, "$(touch${IFS}X)", "`touch X`", "a;b", "../x", "1" * 400 + "mbit"]
)


def paths(tree, path=()):
    """All nodes of a tree."""
    yield path
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from paths(value, (*path, key))


PATHS = list(paths(TREE))[1:]


@st.composite
def changed_trees(draw):
    tree = copy.deepcopy(TREE)
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        node = tree
        try:
            for key in path[:-1]:
                node = node[key]
            match draw(st.sampled_from(["set", "remove", "add"])):
                case "set":
                    node[path[-1]] = draw(VALUES)
                case "remove":
                    del node[path[-1]]
                case "add":
                    node[draw(st.text())] = draw(VALUES)
        except (KeyError, IndexError, TypeError):  # removed or replaced before
            continue
    return yaml.safe_dump(tree, allow_unicode=True).encode()


@st.composite
def changed_texts(draw):
    content = bytearray(TEXT.encode())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 40))] = draw(st.binary(max_size=20))
    return bytes(content)


@given(content=changed_trees() | changed_texts() | st.binary(max_size=200))
def test_any_file_is_accepted_or_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "params.yaml"
    path.write_bytes(content)
    try:
        Parameters(path)
    except UserError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) <= 300 + len(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{TEXT}\ntrain: {{}}\n", "'train' is there a second time: remove one"),
        (TEXT.encode("utf-16"), "not UTF-8 at byte 0"),
        ("# é".encode("latin1"), "not UTF-8 at byte 2"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: &a [*a]", "nested too deeply"),
        (BOMB, "too many values"),
        ("train: {steps: 1" + "0" * 4200 + "}", "train.steps: expected a finite number"),
        ("train: {learning_rate: .inf}", "train.learning_rate: expected a finite number"),
        ("seeds: [2020-01-01]", "seeds.0: expected a text or a number (found a date): quote it"),
        ("? [a, b]\n: 1", "line 1: a key that is no text"),
        ("x" * 1_000_001, "larger than 1 MB"),
        ("\x00", "not YAML"),
        ("a: !!python/name:os.system", "not YAML"),
        ("train: {link: {rate: %smbit}}" % ("1" * 400), "train.link.rate: link rate"),
        ("{'\\x1b[31m': 1}", r"\x1b[31m: unknown key"),
    ],
)
def test_what_no_file_may_hold_is_named(tmp_path, content, message):
    path = Path(tmp_path, "params.yaml")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        Parameters(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) <= 300 + len(str(path))


def test_a_key_of_a_json_file_is_there_once(tmp_path):
    path = Path(tmp_path, "params.json")
    path.write_text('{"train": {}, "train": {}}')
    with pytest.raises(UserError, match="'train' is there twice in one mapping"):
        Parameters(path)
