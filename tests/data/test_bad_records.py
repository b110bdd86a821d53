"""Every kind of bad record, in every format: skipped, counted and named, or refused in one line."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import cycle

import pytest

from shardlab.config.model_and_data import Data
from shardlab.core.errors import UserError
from shardlab.data import limits, mediawiki
from shardlab.data.corpus_file import read_corpus
from shardlab.data.sources import prepare

GOOD = b'{"id": "1", "title": "Good", "text": "text"}'
SURROGATE = "half of a surrogate pair in the text"
RECORDS = {
    b'{"id": %b, "title": "a", "text": "b"}' % (b"7" * 5000): "a number out of range",
    b'{"id": 123456789012345678901234567890, "title": "a", "text": "b"}': "id is neither text nor",
    b'{"title": "a", "text": "b", "more": 1e999}': "a number out of range",
    b'{"title": "a", "text": "\xed\xa0\x80"}': "not UTF-8",
    b'{"title": "a", "text": "\xff"}': "not UTF-8",
    b'{"title": "a", "text": "\\ud800"}': SURROGATE,
    b'{"title": "a", "text": ?}': "not JSON",
    b'{"title": "a", "text": "b", "more": %b}' % (b"[" * 2000 + b"]" * 2000): "nested too deeply",
    b'{"title": "a", "text": "b", "more": [%b{}]}' % (b"{}," * (1 << 20)): "over 1048576 brackets",
    b'{"title": "a", "text": "%b"}' % (b"x" * (17 << 20)): "larger than 16 MiB",
    b'{"title": "a", "text": "%b"}' % (b"x" * (1 << 19)): "over 262144 characters without a space",
    b'{"id": "%b", "title": "a", "text": "b"}' % (b"x" * 1001): "id longer than 1000 characters",
    b"[]": "not an object",
    b'{"title": "a"}': "no text",
    b'{"title": "a", "text": " "}': "empty text",
    b'{"title": 3, "text": "b"}': "title is not text",
    b'{"text": 3}': "text is not text",
    b'{"id": [1], "title": "a", "text": "b"}': "id is neither text nor a whole number",
}
SMALL = [record for record in RECORDS if len(record) < 1 << 20]
PAGE = (
    b"<page><title>%b</title><ns>%b</ns><id>%b</id><revision><id>x</id><timestamp>no</timestamp>"
    b"<text>%b</text></revision></page>"
)
PAGES = {
    PAGE % (b"a", b"0", b"x", b"b"): "id or namespace is no whole number",
    PAGE % (b"a", b"x", b"2", b"b"): "id or namespace is no whole number",
    PAGE % (b"", b"0", b"2", b"b"): "no title",
    PAGE % (b"a", b"0", b"2", b""): "no text",
    PAGE % (b"a", b"0", b"2", b"{{b}}"): "empty text",
    PAGE % (b"a", b"0", b"2", b"x" * (3 << 20)): "text larger than 2 MiB",
    PAGE % (b"a" * (3 << 20), b"0", b"2", b"b"): "title larger than 2 MiB",
    PAGE % (b"a", b"0", b"2", b"&lt;b>" * 10_000): "too many brackets or tags that nothing closes",
    PAGE % (b"a", b"0", b"2", b"* a\n" * 300_000): "over 200000 marks",
}


def run(tmp_path, source, content, policy):
    path = tmp_path / "in"
    path.write_bytes(content)
    data = Data(source=source, path=str(path), bad_records=policy)
    summary = prepare(data, tmp_path / "corpus.json", tmp_path / "work")
    return [line.document.title for line in read_corpus(tmp_path / "corpus.json")], summary


def check(tmp_path, source, content, kinds):
    """Skip them all and name each, or refuse the first."""
    titles, summary = run(tmp_path, source, content, "skip")
    assert titles == ["Good", "Good"]
    assert summary["bad_records"]["count"] == len(kinds)
    assert sum(summary["bad_records"]["kinds"].values()) == len(kinds)
    for n, (named, kind) in enumerate(zip(summary["bad_records"]["first"], kinds, strict=True), 2):
        assert re.match(rf"(record|line|document) '?{n}\b.*: {kind}", named)
        assert len(named) < 200
    with pytest.raises(UserError, match=kinds[0]) as caught:
        run(tmp_path, source, content, "refuse")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["json", "jsonl"])
def test_all_at_once_leave_the_good_records(tmp_path, source):
    records = [GOOD, *RECORDS, GOOD]
    # those of the reader are named before those of the corpus: the order is that of the file
    content = b"[%b]" % b",".join(records) if source == "json" else b"\n".join(records)
    check(tmp_path, source, content, list(RECORDS.values()))


@pytest.mark.parametrize(
    ("record", "source"),
    list(zip(SMALL, cycle(["json", "jsonl"]), strict=False)),
    ids=range(len(SMALL)),
)
def test_each_record_alone(tmp_path, record, source):
    records = [GOOD, record, GOOD]
    content = b"[%b]" % b",".join(records) if source == "json" else b"\n".join(records)
    check(tmp_path, source, content, [RECORDS[record]])


@pytest.mark.parametrize("source", ["json", "jsonl"])
def test_a_byte_order_mark_is_passed_over(tmp_path, source):
    content = b"\xef\xbb\xbf" + (b"[%b]" % GOOD if source == "json" else GOOD)
    assert run(tmp_path, source, content, "refuse")[0] == ["Good"]


def test_all_bad_pages_leave_the_good_ones(tmp_path):
    good = PAGE % (b"Good", b"0", b"1", b"text")
    dump = b"<mediawiki><siteinfo/>%b</mediawiki>" % b"".join([good, *PAGES, good])
    # a page is named when its markup is parsed, later than one whose fields are bad
    titles, summary = run(tmp_path, "mediawiki", dump, "skip")
    assert titles == ["Good", "Good"]
    assert summary["bad_records"]["count"] == len(PAGES)
    named = summary["bad_records"]["first"]
    for kind in PAGES.values():
        assert any(f": {kind}" in name for name in named)
    assert all(len(name) < 200 for name in named)


@pytest.mark.parametrize("content", [b"<html/>", b"", b"x", b"<mediawiki>", b"<mediawiki></page>"])
def test_other_xml_is_refused_in_one_line(tmp_path, content):
    for policy in ("refuse", "skip"):
        with pytest.raises(UserError, match="page 1: not a whole MediaWiki dump") as caught:
            run(tmp_path, "mediawiki", content, policy)
        assert "\n" not in str(caught.value)


def test_a_page_without_namespace_has_that_of_its_prefix(tmp_path):
    page = PAGE.replace(b"<ns>%b</ns>", b"")
    head = b'<siteinfo><namespaces><namespace key="1">Talk</namespace></namespaces></siteinfo>'
    pages = page % (b"Talk:a", b"1", b"chat") + page % (b"Star: a", b"2", b"text")
    dump = b"<mediawiki>%b%b</mediawiki>" % (head, pages)
    titles, summary = run(tmp_path, "mediawiki", dump, "refuse")
    assert titles == ["Star: a"]
    assert summary["left_out"] == {"not in the article namespace": 1}


def kill_itself(page):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_parser_is_reported_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(mediawiki, "_strip", kill_itself)
    dump = b"<mediawiki>%b</mediawiki>" % (PAGE % (b"a", b"0", b"1", b"b"))
    with pytest.raises(UserError, match="pages after the beginning") as caught:
        run(tmp_path, "mediawiki", dump, "skip")
    assert "\n" not in str(caught.value)


def test_a_page_that_takes_too_long_ends_its_process():
    code = """
from shardlab.data import mediawiki
mediawiki._LONGEST_S = 0.1
mediawiki._strip(mediawiki._Page("1", "a", "}}{{a|>\\n==" * 3000))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGVTALRM


def test_a_text_in_parts_is_the_text(monkeypatch):
    monkeypatch.setattr(limits, "PART", 8)
    text = "one two\n\nthree  four five\tsix seven"
    parts = list(limits.parts(text, lambda *_: True))
    assert "".join(parts) == text
    assert all(len(part) <= 8 for part in parts)
    assert all(part[0].isspace() for part in parts[1:])
    assert limits.excess(text) is None
    assert limits.excess("one ninechars") is not None
    assert limits.excess(json.dumps("x" * 9)) is not None
