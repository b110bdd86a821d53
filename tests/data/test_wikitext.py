import pytest

from shardlab.data.sources.mediawiki import plain_text


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
    ],
)
def test_markup_becomes_prose(markup, text):
    assert plain_text(markup) == text


def test_an_appendix_ends_at_the_next_section_of_its_level():
    text = plain_text("Lead\n== Notes ==\nn1\n=== Old ===\nn2\n== Life ==\nlived\n==See also==\nx")
    assert "lived" in text
    assert not any(word in text for word in ("n1", "n2", "Old", "x", "Notes"))
