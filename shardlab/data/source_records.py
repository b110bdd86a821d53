"""Conversion of raw records to documents, and a tally of those that are none."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import CorpusDocument

LARGEST = 16 << 20
"""bytes of a record in a file, and characters of a document"""
TOO_LARGE = f"larger than {LARGEST >> 20} MiB"
_LONGEST_ID = 1000
_NAMED = 100


class Fields(NamedTuple):
    """Names of the fields of a record."""

    text: str = "text"
    title: str | None = None
    """None: `title` of the records that have one"""


FIELDS = Fields()


class Tally:
    """Counter of records that are no documents; refuses the first of them if asked to.

    Args:
        policy: `refuse` or `skip` (`data.bad_records`).
        where: name of the source, for messages.
    """

    def __init__(self, policy: str, where: str) -> None:
        self._policy = policy
        self._where = where
        self._kinds: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._named: list[str] = []
        self._first = ""

    def bad(self, position: str, kind: str, fix: str = "fix it") -> None:
        """Record a bad record, for example at `record 7` of kind `no title`.

        Args:
            fix: what the user could do, if it is refused.

        Raises:
            UserError: when bad records are refused.
        """
        if self._policy == "refuse":
            raise UserError(
                f"{self._where}: {position}: {kind}; {fix}, or set data.bad_records to skip"
            )
        self._first = self._first or f"{position}: {kind}; {fix}"
        self._kinds[kind] += 1
        if len(self._named) < _NAMED:
            self._named.append(f"{position}: {kind}")

    def leave_out(self, kind: str) -> None:
        """Count a good record that the source leaves out on purpose."""
        self._left_out[kind] += 1

    def empty(self) -> UserError:
        """Return the error of a source without documents, with the first of the bad records."""
        if not self._first:
            return UserError(f"{self._where}: no documents: check data.source and data.path")
        bad = f"bad records: {self._kinds.total()}, the first at {self._first}"
        return UserError(f"{self._where}: no documents; {bad}")

    def as_json(self) -> dict[str, Any]:
        """Return `bad_records` and `left_out`: counts by kind, and the first 100 bad ones by
        position."""
        return {
            "bad_records": {
                "count": self._kinds.total(),
                "kinds": dict(self._kinds),
                "first": self._named,
            },
            "left_out": dict(self._left_out),
        }


def to_documents(
    records: Iterable[tuple[str, str, Any]], tally: Tally, fields: Fields = FIELDS
) -> Iterator[CorpusDocument]:
    """Yield the documents of raw records; those with neither title nor text are left out.

    Args:
        records: position for messages, an id, and a value that should be a mapping with a text and
            may have a title (not empty if `fields` names it), and an `id` in place of the given
            one. `title` and `id` that nobody asked for count where they are text or a number.
    """
    for position, identity, value in records:
        kind = _complaint(value, fields)
        if kind is not None:
            tally.bad(position, kind, _fix(value, fields))
        elif not (text := value[fields.text]).strip():
            tally.leave_out("empty text")
        elif len(text) > LARGEST:
            tally.bad(position, TOO_LARGE)
        else:
            stated = _text_of(value.get("id"))
            yield CorpusDocument(
                identity if stated is None else stated, _title(value, fields), text
            )


def _fix(value: Any, fields: Fields) -> str:
    if not isinstance(value, dict):
        return "fix it"
    named = {"text_column": fields.text, "title_column": fields.title}
    missing = next((key for key, name in named.items() if name and name not in value), None)
    if missing is None or not value:
        return "fix it"
    keys = " ".join(", ".join(key for key in value if isinstance(value[key], str)).split())[:100]
    if not keys:
        return "fix it: no key of a record holds text"
    return f"fix it, or set data.{missing} to one of its keys ({keys})"


def _title(value: dict[str, Any], fields: Fields) -> str:
    title = _text_of(value.get(fields.title or "title")) or ""
    return title if title.strip() else ""


def _text_of(value: Any) -> str | None:
    """Return text, or a number as text, whole where it is 1.0: so pandas writes 1 in a column with
    gaps; None of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    whole = isinstance(value, int) or (math.isfinite(value) and value == int(value))
    return str(int(value) if whole else value)


def _complaint(value: Any, fields: Fields) -> str | None:
    if not isinstance(value, dict):
        return "not an object"
    name = fields.title or "title"
    if fields.title and value.get(name) is not None and _text_of(value[name]) is None:
        return f"{name} is not text"
    title = _title(value, fields)
    if fields.title and not title:
        return f"no {name}" if value.get(name) is None else f"empty {name}"
    text = value.get(fields.text)
    if text is None:
        return f"no {fields.text}"
    if not isinstance(text, str):
        return f"{fields.text} is not text"
    if title and not text.strip():
        return f"empty {fields.text}"
    identity = _text_of(value.get("id")) or ""
    if len(identity) > _LONGEST_ID:
        return f"id longer than {_LONGEST_ID} characters"
    try:
        f"{identity}{title}{text}".encode()
    except UnicodeEncodeError:
        return "not UTF-8, or half of a surrogate pair in the text"
    return None
