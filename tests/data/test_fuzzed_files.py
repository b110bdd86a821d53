"""Any bytes give documents or a `UserError` of one line: readers, corpus file and manifest."""

import io
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.data import json_files, mediawiki
from shardlab.data.corpus_file import Document, read_corpus, write_corpus
from shardlab.data.source_records import Tally, to_documents, within_limits
from shardlab.data.tokens import open_split

DUMP = (
    b'<mediawiki><siteinfo><namespaces><namespace key="1">Talk</namespace></namespaces></siteinfo>'
    b"<page><title>a &amp; b</title><ns>0</ns><id>1</id><revision><id>2</id>"
    b"<text xml:space='preserve'>'''A''' [[b|c]] {{d|e=f}} &lt;ref&gt;g&lt;/ref&gt;\n"
    b"{|\n|-\n| h\n|}\n== i ==\n* j [http://k l]</text></revision></page>"
    b"<page><title>m</title><id>3</id><redirect title='n'/></page></mediawiki>"
)
ARRAY = b'[{"id": 1, "title": "a", "text": "\\ud83e\\udd8a \\" b"}, {"title": "c", "text": "d"}]'
SHARD = {"file": "train-0.bin", "tokens": 0, "documents": 0, "bytes": 0, "sha256": "0" * 64}
MANIFEST = {
    **{"dtype": "uint16", "vocabulary": 300, "end_of_text": 0, "end_of_text_token": "e"},
    **dict.fromkeys(("corpus_sha256", "tokenizer_sha256", "recipe_sha256"), "0" * 64),
    **{"train": [SHARD], "validation": [SHARD]},
}
BITS = [b"{", b"[", b'"', b"\\", b",", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n"]
BITS += [b"<", b">", b"&lt;", b"{{", b"]]", b"</page>", b"<page>", b"<text>", b"-->", b"]]>"]
BITS += [b"1e999", b"-", b"9" * 30, b"null", b"NaN", b"\\ud800", b"'''", b"&x;", b"{|", b"|}", b""]


def spoilt(content):
    """Contents with some places replaced, and anything else."""
    place = st.tuples(st.integers(0, len(content)), st.integers(0, 9), st.sampled_from(BITS))

    def spoil(edits):
        spoiled = content
        for start, length, bit in edits:
            spoiled = spoiled[:start] + bit + spoiled[start + length :]
        return spoiled

    return st.lists(place, max_size=6).map(spoil) | st.binary(max_size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def one_line(read):
    """Return the documents, or none after an error of one line."""
    try:
        return list(read())
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) <= 300
        return []


def well_formed(documents, folder):
    for document in documents:
        assert document.title == "" or document.title.strip()
        assert document.text.strip()
    if documents:
        write_corpus(folder / "out.json", documents)
        assert [line.document for line in read_corpus(folder / "out.json")] == documents


POLICIES = st.sampled_from(["refuse", "skip"])


@settings(suppress_health_check=[HealthCheck.differing_executors])
@given(
    spoilt(ARRAY),
    POLICIES,
    st.sampled_from([json_files.read_json_array, json_files.read_json_lines, json_files.read_json]),
)
@example(b'[{"id": %b}]' % (b"1" * 5000), "skip", json_files.read_json_array)
@example(b'{"id": %b}' % (b"1" * 5000), "skip", json_files.read_json_lines)
@example(b"[" * 40_000, "skip", json_files.read_json_array)
@example(b"[" * 40_000, "skip", json_files.read_json_lines)
def test_any_json(folder, content, policy, read):
    path = folder / "in.json"
    path.write_bytes(content)
    tally = Tally(policy, "in.json")
    documents = one_line(lambda: within_limits(to_documents(read(path, tally), tally), tally))
    well_formed(documents, folder)


@given(spoilt(DUMP), POLICIES)
@example(b"<html/>", "skip")
@example(DUMP.replace(b"<id>1</id>", b"<id>x</id>"), "skip")
@example(DUMP.replace(b"<ns>0</ns>", b"<ns/>"), "skip")
def test_any_dump(folder, content, policy):
    tally = Tally(policy, "in.xml")

    def read():
        for page in mediawiki._articles(mediawiki._pages(io.BytesIO(content), "in.xml"), tally):
            result, text = mediawiki._strip(page)
            if text:
                yield Document(page.id, page.title, text)
            else:
                assert len(result.markup) < 100

    for document in one_line(read):
        assert document.title


@given(
    spoilt(
        b'[\n{"id": "1", "title": "a", "text": "b"},\n{"id": "2", "title": "c", "text": "d"}\n]\n'
    )
)
@example(b'[\n{"id": "1", "title": "a", "text": "\\ud800"}\n]\n')
@example(b'[\n{"id": 1, "title": null, "text": "b"}\n]\n')
@example(b"[\n" + b"[" * 40_000)
def test_any_corpus_file(folder, content):
    path = folder / "corpus.json"
    path.write_bytes(content)
    for line in one_line(lambda: read_corpus(path)):
        line.document.content.encode()


@given(spoilt(json.dumps(MANIFEST).encode()))
@example(b"[" * 40_000)
@example(json.dumps({**MANIFEST, "vocabulary": 10**30}).encode())
@example(json.dumps({**MANIFEST, "vocabulary": -1}).encode())
@example(json.dumps({**MANIFEST, "train": [{**SHARD, "tokens": 10**100}]}).encode())
def test_any_manifest(folder, content):
    (folder / "tokens").mkdir(exist_ok=True)
    (folder / "tokens" / "train-0.bin").write_bytes(b"")
    (folder / "tokens" / "manifest.json").write_bytes(content)
    one_line(lambda: open_split(folder / "tokens", "train").arrays())
