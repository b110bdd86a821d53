"""Text in Markdown, and back."""

import re

_MARKUP = r"([\\`*_\[\]<>|~&])"


def escape(text: str) -> str:
    """Escape text to one line that Markdown shows as it is, without markup or HTML."""
    return re.sub(_MARKUP, r"\\\1", " ".join(text.split()))


def unescape(text: str) -> str:
    """Return Markdown as a terminal is to show it: what `escape` has marked is itself again."""
    return re.sub(rf"\\{_MARKUP}", r"\1", text)
