"""The manifest of tokens that other programs made: parts of their files, which are not copied."""

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
from shardlab.data.tokenizer import given_tokenizer, number_tokenizer
from shardlab.data.tokens import Manifest


class _Counted(NamedTuple):
    content: Content
    layout: TokenLayout
    ends: np.ndarray

    def part(self, first: int, last: int) -> TokenFile:
        """Return the documents from `first` to before `last`."""
        edges = np.append(0, self.ends)
        start, stop = int(edges[first]), int(edges[last])
        width = np.dtype(self.layout.dtype).itemsize
        ranges, before = [], 0
        for at, count in self.layout.ranges:
            low, high = max(start - before, 0), min(stop - before, count)
            if low < high:
                ranges.append([at + low * width, high - low])
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
    """Write the tokenizer in `out`, and in `out/tokens` a manifest of the parts of `files`.

    The last `data.validation_share` of the documents are for validation: so both splits are
    stretches of the files as they lie.

    Args:
        options: those for the model, `Tokenize.for_model`.
        files: their content, as `prepare` found it.
        parameters: of the experiment, by dotted keys, for the manifest.

    Returns:
        Tokens of each training document.

    Raises:
        UserError: a file is damaged, changed or does not fit the tokenizer, or a split is empty.
    """
    if options.end_of_text is None:
        tokenizer = given_tokenizer(str(options.tokenizer), work)
    else:
        tokenizer = number_tokenizer(options.vocabulary or 0, options.end_of_text)
    end, largest, counted = tokenizer.end_of_text_id, 0, []
    for file in track(files, "tokens", unit=" files"):
        content = Content(**file)
        refuse_change(content)
        layout = read_layout(Path(content.path), data.ids_column, tokenizer.rows)
        high, ends = scan(Path(content.path), layout, tokenizer.rows, end)
        largest = max(largest, high)
        counted.append(_Counted(content, layout, ends))
    train, validation, lengths = _split(data, counted, end)
    manifest = Manifest(
        dtype=None,
        vocabulary=max(tokenizer.vocabulary, largest + 1),
        end_of_text=end,
        end_of_text_token=tokenizer.end_of_text,
        corpus_sha256=sha256_of_value([each.content.sha256 for each in counted]),
        tokenizer_sha256=tokenizer.sha256,
        train=train,
        validation=validation,
        parameters={**(parameters or {})},
    )
    tokenizer.save(out)
    publish(manifest, out)
    return lengths


def _split(
    data: Data, counted: list[_Counted], end: int
) -> tuple[list[TokenFile], list[TokenFile], np.ndarray]:
    """Return the parts for training, those for validation, and the lengths of the former."""
    total = sum(len(each.ends) for each in counted)
    total = min(total, data.documents or total)
    if not total:
        raise UserError(f"data.path {data.path!r}: no tokens")
    edge = total - round(total * data.validation_share)
    parts, lengths = _parts(counted, edge, total)
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
    counted: list[_Counted], edge: int, total: int
) -> tuple[tuple[list[TokenFile], list[TokenFile]], np.ndarray]:
    """Return the documents before `edge` and those from it on, and the lengths of the former."""
    parts: tuple[list[TokenFile], list[TokenFile]] = [], []
    lengths, before = [], 0
    for each in counted:
        middle, last = (min(max(at - before, 0), len(each.ends)) for at in (edge, total))
        for chosen, (first, stop) in zip(parts, ((0, middle), (middle, last)), strict=True):
            if first < stop:
                chosen.append(each.part(first, stop))
        lengths.append(np.diff(each.ends[:middle], prepend=0))
        before += len(each.ends)
    return parts, np.concatenate(lengths)
