"""Manifest of tokens of other programs: it refers to parts of their files and copies nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardlab.core.content import Content
from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_value
from shardlab.core.progress import track
from shardlab.data.settings import Data, Tokenize
from shardlab.data.token_files import TokenFile, TokenLayout, read_layout, refuse_change, scan
from shardlab.data.tokenize import publish
from shardlab.data.tokenizer import number_tokenizer, pretrained_tokenizer
from shardlab.data.tokens import Manifest


class _ScannedFile(NamedTuple):
    content: Content
    layout: TokenLayout
    ends: np.ndarray
    """Ends of the documents, in tokens."""

    def part(self, first: int, last: int) -> TokenFile:
        """Return documents `first` to `last - 1`."""
        edges = np.append(0, self.ends)
        start, stop = int(edges[first]), int(edges[last])
        width = np.dtype(self.layout.dtype).itemsize
        ranges, before = [], 0
        for offset, count in self.layout.ranges:
            low, high = max(start - before, 0), min(stop - before, count)
            if low < high:
                ranges.append([offset + low * width, high - low])
            before += count
        return TokenFile(
            content=self.content,
            dtype=self.layout.dtype,
            ranges=ranges,
            documents=last - first,
        )


def map_tokens(
    data: Data,
    options: Tokenize,
    files: Sequence[Mapping[str, Any]],
    work: Path,
    out: Path,
    parameters: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Write the tokenizer to `out`, and to `out/tokens` a manifest of the parts of `files`.

    The last `data.validation_share` of the documents are the validation split, so that both splits
    are consecutive parts of the files.

    Args:
        options: Options for the model, from `Tokenize.for_model`.
        files: Content of the files, as `prepare` returned it.
        parameters: Parameters of the experiment by dotted keys, for the manifest.

    Returns:
        tokens of each training document.

    Raises:
        UserError: A file is damaged, changed or does not fit the tokenizer, or a split is empty.
    """
    if options.end_of_text is None:
        tokenizer = pretrained_tokenizer(str(options.tokenizer), work)
    else:
        tokenizer = number_tokenizer(options.vocabulary or 0, options.end_of_text)
    end, largest, scanned = tokenizer.end_of_text_id, 0, []
    for file in track(files, "tokens", unit=" files"):
        content = Content(**file)
        refuse_change(content)
        layout = read_layout(Path(content.path), data.ids_column, tokenizer.rows)
        high, ends = scan(Path(content.path), layout, tokenizer.rows, end)
        largest = max(largest, high)
        scanned.append(_ScannedFile(content, layout, ends))
    train, validation, lengths = _split(data, scanned, end)
    manifest = Manifest(
        dtype=None,
        vocabulary=max(tokenizer.vocabulary, largest + 1),
        end_of_text=end,
        end_of_text_token=tokenizer.end_of_text,
        corpus_sha256=sha256_of_value([file.content.sha256 for file in scanned]),
        tokenizer_sha256=tokenizer.sha256,
        train=train,
        validation=validation,
        parameters={**(parameters or {})},
    )
    tokenizer.save(out)
    publish(manifest, out)
    return lengths


def _split(
    data: Data, scanned: list[_ScannedFile], end: int
) -> tuple[list[TokenFile], list[TokenFile], np.ndarray]:
    """Return the training parts, the validation parts, and the lengths of training documents."""
    total = sum(len(file.ends) for file in scanned)
    total = min(total, data.documents or total)
    if not total:
        raise UserError(f"data.path {data.path!r}: no tokens: give files that hold tokens")
    edge = total - round(total * data.validation_share)
    parts, lengths = _parts(scanned, edge, total)
    sizes = [sum(count for part in split for _, count in part.ranges) for split in parts]
    if 0 in sizes:
        split, change = ("validation", "raise") if sizes[0] else ("training", "lower")
        fix = f"{change} it (one document is {1 / total:.2g}), or " if total > 1 else ""
        raise UserError(
            f"data.path {data.path!r}: no token of the {total} documents falls into the {split} "
            f"split at data.validation_share {data.validation_share}; {fix}give more documents, "
            f"which end with token {end} where no index says so"
        )
    return *parts, lengths


def _parts(
    scanned: list[_ScannedFile], edge: int, total: int
) -> tuple[tuple[list[TokenFile], list[TokenFile]], np.ndarray]:
    """Return the documents before and from number `edge`, and the lengths of those before it."""
    parts: tuple[list[TokenFile], list[TokenFile]] = [], []
    lengths, before = [], 0
    for file in scanned:
        middle, last = (min(max(n - before, 0), len(file.ends)) for n in (edge, total))
        for split, (first, stop) in zip(parts, ((0, middle), (middle, last)), strict=True):
            if first < stop:
                split.append(file.part(first, stop))
        lengths.append(np.diff(file.ends[:middle], prepend=0))
        before += len(file.ends)
    return parts, np.concatenate(lengths)
