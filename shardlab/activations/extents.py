"""Which parts of a growing range of bytes are free."""

from bisect import insort


class Extents:
    """Hands out parts of a range and takes them back; neighbours that are free become one.

    Steps that keep the same amount, in whatever pieces, so find the room of the step before.
    """

    def __init__(self) -> None:
        self.end = 0
        """of the range"""
        self._free: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Where the first free part of `size` bytes begins; None when there is none."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def lacking(self, size: int) -> int:
        """Bytes that the range has to grow by until `size` of them are free at its end."""
        start, free = self._free[-1] if self._free else (self.end, 0)
        return size - (free if start + free == self.end else 0)

    def grow(self, size: int) -> None:
        """Adds free bytes at the end."""
        self.end += size
        self.give(self.end - size, size)

    def give(self, start: int, size: int) -> None:
        """Frees what `take` handed out."""
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for part in self._free:
            if merged and sum(merged[-1]) == part[0]:
                part = merged[-1][0], merged.pop()[1] + part[1]
            merged.append(part)
        self._free = merged
