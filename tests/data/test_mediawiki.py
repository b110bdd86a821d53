"""MediaWiki dumps: articles in order, bad pages, XML that is refused, and markup."""

import bz2

import pytest

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus
from shardlab.data.mediawiki import plain_text
from shardlab.data.settings import Data
from shardlab.data.sources import prepare


def page(number, title, body, namespace=0, redirect=""):
    return (
        f"<page><title>{title}</title><ns>{namespace}</ns><id>{number}</id>{redirect}"
        f"<revision><id>1</id><text>an older one</text></revision>"
        f"<revision><id>2</id><timestamp>2020-01-01T00:00:00Z</timestamp>"
        f"<text>{body}</text></revision></page>"
    )


DUMP = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10">'
    "<siteinfo><sitename>W</sitename></siteinfo>"
    + page(1, "Alpha", "'''Alpha''' is [[letter|a letter]].\n\n== References ==\nbook")
    + page(2, "Talk:Alpha", "chat", namespace=1)
    + page(3, "A", "#REDIRECT [[Alpha]]", redirect='<redirect title="Alpha" />')
    + page(4, "Void", "{{only|a template}}")
    + page(5, "", "no title")
    + page(6, "Nothing", "")
    + page(7, "Large", "x" * (3 << 20))
    + page(8, "Beta_blocker", "Beta is next.")
    + "</mediawiki>"
).encode()


def run(tmp_path, content, name="dump.xml", **options):
    (tmp_path / name).write_bytes(content)
    data = Data(source="mediawiki", path=str(tmp_path / name), **options)
    summary = prepare(data, tmp_path / "corpus.json", tmp_path / "work")
    return [tuple(document) for document in read_corpus(tmp_path / "corpus.json")], summary


@pytest.mark.parametrize("name", ["dump.xml", "dump.xml.bz2"])
def test_articles_come_in_order_and_bad_pages_are_named(tmp_path, name):
    content = bz2.compress(DUMP) if name.endswith(".bz2") else DUMP
    documents, summary = run(tmp_path, content, name, bad_records="skip")
    assert documents == [
        ("1", "Alpha", "Alpha is a letter."),
        ("8", "Beta blocker", "Beta is next."),
    ]
    # a page is named when its markup is parsed, later than one whose fields are bad
    assert sorted(summary["bad_records"]["first"]) == [
        "page 4 ('Void'): empty text",
        "page number 5: no title",
        "page number 6: no text",
        "page number 7: text larger than 2 MiB",
    ]
    assert summary["left_out"] == {"not in the article namespace": 1, "redirect": 1}


GERMAN = (
    '<mediawiki xml:lang="de"><siteinfo><namespaces><namespace key="0"/>'
    '<namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>'
    "</namespaces></siteinfo>"
    + page(
        1,
        "Bach",
        "[[Datei:Bach.jpg|mini|Text]]\n'''Bach''' ist {{formatnum:12}} km lang, '''nach "
        "{{Entfernung|30|km}}''' endet er, [[Hilfe:Seite|Hilfe]].{{Literatur|A|Seite=1}}\n"
        "[[Bild:Karte.png|miniatur|Karte]]\n"
        "== Weblinks ==\n* x {{convert|1|km}}\n[[Kategorie:B]]\n== See also ==\nx",
    )
    + "</mediawiki>"
).encode()


def test_a_dump_is_read_by_its_own_names_and_lost_numbers_are_counted(tmp_path):
    documents, summary = run(tmp_path, GERMAN)
    assert documents == [("1", "Bach", "Bach ist  km lang, nach  endet er, Hilfe.")]
    assert summary["left_out"] == {"number in a template": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html/>", "page 1: not a complete MediaWiki dump .it begins with <html>"),
        (b"", "page 1: not a complete MediaWiki dump"),
        (b"<?xml version='1.0' encoding='klingon'?><mediawiki/>", "unknown encoding: klingon"),
        (b"<mediawiki></page>", "page 1: not a complete MediaWiki dump .mismatched tag"),
        (DUMP[: len(DUMP) - 20], "page 8: not a complete MediaWiki dump"),
    ],
    ids=range(5),
)
def test_other_xml_is_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, content, bad_records="skip")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "corpus.json").exists()


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and [[Target|shown]] and [[plain]]", "Bold and shown and plain"),
        ("Cat ({{IPA|k}}) sits.{{cite}}", "Cat sits."),
        ("One.<ref>a book</ref> Two.", "One. Two."),
        ("[[File:a.jpg|thumb|with [[link]]]]Text", "Text"),
        ("''[[Image:a.jpg|thumb|x]]slanted''", "slanted"),
        ("Text\n[[Category:Things]]\n[[de:Sache]]", "Text"),
        ("Before\n{|\n| cell\n|}\nAfter", "Before\n\nAfter"),
        ("[http://example.org a site] &amp; more", "a site & more"),
        (
            "Lead\n== Notes ==\nn\n=== Old ===\nn\n== Life ==\nlived\n==See also==\nx",
            "Lead\nLife\nlived",
        ),
    ],
)
def test_markup_becomes_prose(markup, text):
    assert plain_text(markup) == text
