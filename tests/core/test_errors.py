"""Words that are meant, and tracebacks of refusals."""

import traceback

import pytest

from shardlab.core.errors import UserError, nearest, without_frames


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("momentun", "did you mean 'momentum'?"),
        ("lr", "did you mean 'learning_rate'?"),
        ("int3", "did you mean 'int4' or 'int8'?"),
        ("xyz", "valid: int4, int8, learning_rate, momentum"),
    ],
)
def test_all_that_are_as_near_are_named(word, expected):
    assert nearest(word, ["int8", "int4", "momentum", "learning_rate"]) == expected


def test_a_refusal_shows_no_frame_below_the_call():
    def deep(depth):
        if depth == 0:
            raise UserError("a line")
        deep(depth - 1)

    def frames(call):
        with pytest.raises(UserError, match="a line") as caught:
            call(5)
        return len(traceback.extract_tb(caught.tb))

    assert frames(deep) - frames(without_frames(deep)) == 5
