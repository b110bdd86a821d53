"""Documents refuse keys that earlier versions had, and name those that took their place."""

import pytest

from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.forecast.results import ForecastDocument
from shardlab.search.records import Candidate


@pytest.mark.parametrize(
    "document, old, new",
    [(Candidate, "brief", "label"), (ForecastDocument, "learnt_from", "fitted_on")],
)
def test_a_renamed_key_is_refused_with_its_new_name(document: type, old: str, new: str) -> None:
    with pytest.raises(UserError, match=f"^history.json.{old}: renamed: write {new}"):
        validate(document, {old: "x"}, "history.json")
