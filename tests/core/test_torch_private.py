"""Other versions of torch than those that were tried."""

import re
import tomllib
import warnings

import pytest

from shardlab.core.errors import UserError
from shardlab.core.torch_private import TRIED, check_version
from tests.commands import ROOT


@pytest.mark.parametrize("version", ["2.99.0", "3.0.1+cu130", "2.99.0a0+git0123abc"])
def test_a_minor_that_was_not_tried_is_warned_of_in_one_line(version):
    with pytest.warns(UserWarning, match=re.escape(version)) as caught:
        check_version(version)
    (warning,) = caught
    assert TRIED[-1] in str(warning.message)
    assert "issue" in str(warning.message)
    assert "\n" not in str(warning.message)


@pytest.mark.parametrize("minor", TRIED)
def test_minors_that_were_tried_are_silent(minor):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(f"{minor}.7+cpu")


def test_the_first_rank_warns_for_all(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("2.99.0")


def test_what_the_package_does_not_allow_is_refused_with_the_fix():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (lowest,) = (line for line in project["dependencies"] if line.startswith("torch"))
    major, minor = map(int, lowest.removeprefix("torch>=").split("."))
    with pytest.raises(UserError, match=rf"too old: pip install '{lowest}'"):
        check_version(f"{major}.{minor - 1}.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_version(f"{major}.{minor}.0")
