"""Conversion of raw records to documents, and a tally of those that are none."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from shardlab.core.errors import UserError
from shardlab.data.corpus.corpus_file import Document
from shardlab.data.corpus.limits import excess

_LONGEST_ID = 1000
_NAMED = 100


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

    def bad(self, position: str, kind: str) -> None:
        """Record a bad record, for example at `record 7` of kind `no title`.

        Raises:
            UserError: when bad records are refused.
        """
        if self._policy == "refuse":
            raise UserError(
                f"{self._where}: {position}: {kind}; fix it, or set data.bad_records to skip"
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


def to_documents(records: Iterable[tuple[str, int, Any]], tally: Tally) -> Iterator[Document]:
    """Yield the documents of raw records.

    Args:
        records: position for messages, number from 1, and a value that should be a mapping with
            `title` and `text` (both non-empty text) and may have an `id` (text or whole number;
            the record's number stands in for an absent one).
    """
    for position, number, value in records:
        kind = _complaint(value)
        if kind is None:
            identity = value.get("id")
            yield Document(
                str(number if identity is None else identity), value["title"], value["text"]
            )
        else:
            tally.bad(position, kind)


def within_limits(documents: Iterable[Document], tally: Tally) -> Iterator[Document]:
    """Yield the documents that the next stage can read in bounded memory."""
    for document in documents:
        kind = excess(document.content)
        if kind is None:
            yield document
        else:
            tally.bad(f"document {document.id!r}", kind)


def _complaint(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "not an object"
    for key in ("title", "text"):
        if value.get(key) is None:
            return f"no {key}"
        if not isinstance(value[key], str):
            return f"{key} is not text"
        if not value[key].strip():
            return f"empty {key}"
    if isinstance(value.get("id"), bool) or not isinstance(value.get("id"), str | int | None):
        return "id is neither text nor a whole number"
    if len(str(value.get("id"))) > _LONGEST_ID:
        return f"id longer than {_LONGEST_ID} characters"
    try:
        f"{value.get('id')}{value['title']}{value['text']}".encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in the text"
    return None
