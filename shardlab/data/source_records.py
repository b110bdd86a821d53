"""Conversion of raw records to documents, and a tally of those that are none."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import Document

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
        self._kinds[kind] += 1
        if len(self._named) < _NAMED:
            self._named.append(f"{position}: {kind}")

    def leave_out(self, kind: str) -> None:
        """Count a good record that the source leaves out on purpose."""
        self._left_out[kind] += 1

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
) -> Iterator[Document]:
    """Yield the documents of raw records; those with neither title nor text are left out.

    Args:
        records: position for messages, an id, and a value that should be a mapping with a text and
            may have a title (not empty if `fields` names it), and an `id` (text or whole number)
            in place of the given one.
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
            stated = value.get("id")
            yield Document(identity if stated is None else str(stated), _title(value, fields), text)


def _fix(value: Any, fields: Fields) -> str:
    if not isinstance(value, dict) or fields.text in value or not value:
        return "fix it"
    keys = " ".join(", ".join(value).split())[:100]
    return f"fix it, or set data.text_column to one of its keys ({keys})"


def _title(value: dict[str, Any], fields: Fields) -> str:
    title: str = value.get(fields.title or "title") or ""
    return title if title.strip() else ""


def _complaint(value: Any, fields: Fields) -> str | None:
    if not isinstance(value, dict):
        return "not an object"
    name = fields.title or "title"
    if not isinstance(value.get(name), str | None):
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
    if isinstance(value.get("id"), bool) or not isinstance(value.get("id"), str | int | None):
        return "id is neither text nor a whole number"
    if len(str(value.get("id"))) > _LONGEST_ID:
        return f"id longer than {_LONGEST_ID} characters"
    try:
        f"{value.get('id')}{title}{text}".encode()
    except UnicodeEncodeError:
        return "not UTF-8, or half of a surrogate pair in the text"
    return None
