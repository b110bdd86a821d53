"""What is wrong with a parameter file is one line for each mistake."""

from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError

TEXT = "train: {steps: 30}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{TEXT}\ntrain: {{}}\n", "'train' is there a second time: remove one"),
        (TEXT.encode("utf-16"), "not UTF-8 at byte 0"),
        ("train: {learning_rate: .inf}", "train.learning_rate: expected a finite number"),
        ("seeds: [2020-02-31]", "day is out of range for month"),
        ("a: !!python/name:os.system", "not YAML"),
        ("- train", "expected a mapping of sections"),
        ("train: {link: {rate: %smbit}}" % ("1" * 400), "train.link.rate: link rate"),
        ("{'\\x1b[31m': 1}", r"\x1b[31m: unknown key"),
    ],
)
def test_what_no_file_may_hold_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = Path(tmp_path, "params.yaml")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        Parameters(path)
    assert message in str(caught.value) and str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300 + len(str(path))


def test_a_json_file_is_json(tmp_path: Path) -> None:
    path = Path(tmp_path, "params.json")
    path.write_text('{"seeds": [3]\n"train": {}}')
    with pytest.raises(UserError, match=r"params\.json: not JSON: Expecting ',' delimiter: line 2"):
        Parameters(path)
