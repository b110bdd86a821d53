"""Conversion of raw records to documents, and counts of records that do not become documents."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import CorpusDocument

LARGEST = 16 << 20
"""Largest record of a file, in bytes, and largest document, in characters."""
TOO_LARGE = f"larger than {LARGEST >> 20} MiB"
_LONGEST_ID = 1000
_LISTED = 100
"""Bad records that are listed by position."""


class Fields(NamedTuple):
    """Names of the fields of a record."""

    text: str = "text"
    title: str | None = None
    """Field of titles, required; None: `title`, in records that have it."""


FIELDS = Fields()


class RecordCounts:
    """Counts of bad records and of good records that a source leaves out.

    Args:
        policy: `refuse` or `skip` bad records (`data.bad_records`).
        source: Name of the source, for messages.
    """

    def __init__(self, policy: str, source: str) -> None:
        self._policy = policy
        self._source = source
        self._kinds: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._listed: list[str] = []
        self._first = ""

    def add_bad(self, position: str, kind: str, fix: str = "fix it") -> None:
        """Count a bad record, for example at `record 7` of kind `no title`.

        Args:
            fix: What the user can do about it, for the error.

        Raises:
            UserError: The policy is to refuse bad records.
        """
        if self._policy == "refuse":
            raise UserError(
                f"{self._source}: {position}: {kind}; {fix}, or set data.bad_records to skip"
            )
        self._first = self._first or f"{position}: {kind}; {fix}"
        self._kinds[kind] += 1
        if len(self._listed) < _LISTED:
            self._listed.append(f"{position}: {kind}")

    def add_left_out(self, kind: str) -> None:
        """Count a good record that the source leaves out on purpose."""
        self._left_out[kind] += 1

    def no_documents(self) -> UserError:
        """Return the error of a source without documents, with the first bad record."""
        if not self._first:
            return UserError(f"{self._source}: no documents: check data.source and data.path")
        bad = f"bad records: {self._kinds.total()}, the first at {self._first}"
        return UserError(f"{self._source}: no documents; {bad}")

    def as_json(self) -> dict[str, Any]:
        """Return `bad_records`, with counts by kind and the first 100 records, and `left_out`."""
        return {
            "bad_records": {
                "count": self._kinds.total(),
                "kinds": dict(self._kinds),
                "first": self._listed,
            },
            "left_out": dict(self._left_out),
        }


def to_documents(
    records: Iterable[tuple[str, str, Any]], counts: RecordCounts, fields: Fields = FIELDS
) -> Iterator[CorpusDocument]:
    """Yield the documents of raw records; leave out records with neither title nor text.

    Args:
        records: Position for messages, id and value of each record. The value should be a mapping
            with a text. It may have a title, which must not be empty if `fields` names it, and an
            `id`, which replaces the id of the record. An unnamed `title`, or an `id`, that is
            neither text nor a number is ignored.
    """
    for position, identity, value in records:
        kind = _complaint(value, fields)
        if kind is not None:
            counts.add_bad(position, kind, _fix(value, fields))
        elif not (text := value[fields.text]).strip():
            counts.add_left_out("empty text")
        elif len(text) > LARGEST:
            counts.add_bad(position, TOO_LARGE)
        else:
            record_id = _text_of(value.get("id"))
            yield CorpusDocument(
                identity if record_id is None else record_id, _title(value, fields), text
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
    """Return a text, or a number as text; None for other values.

    1.0 becomes `1`, since pandas turns the integers of a column with gaps into floats.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    is_integral = isinstance(value, int) or (math.isfinite(value) and value == int(value))
    return str(int(value) if is_integral else value)


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
