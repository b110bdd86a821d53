import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import CorpusDocument, read_corpus, write_corpus

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
DOCUMENTS = st.lists(st.builds(CorpusDocument, TEXT, TEXT, TEXT), min_size=1, max_size=10)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus") / "corpus.json"


@given(DOCUMENTS)
def test_corpus_round_trips_and_is_a_json_array(file, documents):
    size = write_corpus(file, documents)
    assert list(read_corpus(file)) == documents
    assert json.loads(file.read_text(encoding="utf-8")) == [d._asdict() for d in documents]
    assert size == {"documents": len(documents), "bytes": sum(d.size for d in documents)}


@given(st.data())
def test_any_ranges_of_bytes_join_to_the_whole(file, data):
    write_corpus(file, data.draw(DOCUMENTS))
    size = file.stat().st_size
    middle = data.draw(st.integers(0, size))
    parts = [*read_corpus(file, 0, middle), *read_corpus(file, middle, size)]
    assert parts == list(read_corpus(file))


@given(st.data())
def test_a_truncated_corpus_is_never_read_to_its_end(file, data):
    write_corpus(file, data.draw(DOCUMENTS))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 3))])
    with pytest.raises(UserError, match=r"byte \d+: damaged .* shardlab prepare"):
        list(read_corpus(file))


def test_missing_corpus_is_reported_with_the_fix(tmp_path):
    with pytest.raises(UserError, match=r"shardlab prepare"):
        list(read_corpus(tmp_path / "corpus.json"))
