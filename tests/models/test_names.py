import pytest

from shardlab.core.errors import UserError
from shardlab.models.names import matching


def test_pattern_matches_any_name_of_a_tied_parameter():
    names = [["embedding.weight", "head.weight"], ["block.0.bias"], ["block.1.bias"]]
    assert matching(["head.*"], names) == {"embedding.weight"}
    assert matching(["*.bias", "*.0.*"], names) == {"block.0.bias", "block.1.bias"}
    assert matching([], names) == frozenset()
    with pytest.raises(UserError, match=r"matches 'haed\.weight'; did you mean 'head\.weight'"):
        matching(["haed.weight"], names)
