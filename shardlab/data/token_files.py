"""Token files of other programs, mapped where they lie: nanoGPT's and llm.c's .bin, Megatron's .bin
with .idx, datatrove's .ds, and folders that `datasets` saved."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, StringConstraints

from shardlab.core.content import Content
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.data.settings import Data

_SUFFIXES = (".bin", ".ds", ".arrow")
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""types by magic number and version: dev/data/data_common.py of karpathy/llm.c"""
_MEGATRON = struct.Struct("<9sQBQQ")
"""megatron/core/datasets/indexed_dataset.py: magic, version, type, sequences, ends of documents"""
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CHUNK = 1 << 24
"""tokens that are looked at at once"""
_AGAIN = "run shardlab prepare, then shardlab tokenize"


class TokenFile(Document):
    """A part of a file of another program: whole documents."""

    content: Content
    """of the whole file when its tokens were counted"""
    dtype: Annotated[str, StringConstraints(pattern=r"^u?int(8|16|32|64)$")]
    """of its tokens, little-endian"""
    ranges: list[list[int]]
    """byte offset and number of tokens of each stretch"""
    documents: int = Field(ge=0)
    bytes: ClassVar[None] = None
    """those of the text are not known"""
    altered: ClassVar[int] = 0

    def arrays(self, folder: Path, dtype: str) -> list[np.ndarray]:
        """Map the stretches.

        Raises:
            UserError: the file is missing, or ends before them.
        """
        path, width = Path(self.content.path), np.dtype(self.dtype).itemsize
        end = max((at + count * width for at, count in self.ranges), default=0)
        if not path.is_file() or path.stat().st_size < end:
            raise _changed(path)
        return map_ranges(path, self.dtype, self.ranges)

    def verify(self, folder: Path, dtype: str, vocabulary: int) -> None:
        """Check that the file is what it was when its tokens were compared with the vocabulary.

        Raises:
            UserError: it is not, or is missing.
        """
        refuse_change(self.content)


def refuse_change(content: Content) -> None:
    """Check that a file is what it was; it is read where its size or date is another.

    Raises:
        UserError: it is not, or there is none.
    """
    now = Content.of(content.path, content)
    if now is None or now.sha256 != content.sha256:
        raise _changed(Path(content.path))


def _changed(path: Path) -> UserError:
    if not path.is_file():
        return UserError(f"{path}: no such file: set data.path to where it is, and {_AGAIN}")
    return UserError(f"{path}: changed since its tokens were counted: {_AGAIN}")


class TokenLayout(NamedTuple):
    """Place and type of the tokens of a file."""

    dtype: str
    ranges: list[list[int]]
    ends: np.ndarray | None
    """of documents, in tokens; None: where the end-of-text token says"""


def map_ranges(path: str | Path, dtype: str, ranges: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Map stretches of a file, given by byte offset and number of tokens."""
    if not ranges:  # an empty file cannot be mapped
        return []
    kind = np.dtype(dtype).newbyteorder("<")
    raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    return [raw[at : at + count * kind.itemsize].view(kind) for at, count in ranges]


def find_token_files(data: Data) -> list[Path]:
    """Return the files of `data.path` with tokens, those of a folder in the order of their names.

    Raises:
        UserError: there are none.
    """
    path = Path(str(data.path))
    if not path.exists():
        raise UserError(f"data.path {data.path!r}: no such file or folder")
    below = [path] if path.is_file() else [*_below(path, data)]
    if found := [file for file in below if file.suffix in _SUFFIXES]:
        arrow = any(file.suffix == ".arrow" for file in found)
        for key, default in (("split", None), ("ids_column", "input_ids")):
            if not arrow and getattr(data, key) != default:
                raise UserError(f"data.{key}: no file that datasets saved is there: remove it")
        if missing := [file for file in found if not file.is_file()]:
            raise UserError(
                f"{missing[0]}: no such file: copy the whole folder, or remove the link"
            )
        if len(same := {file.resolve(): file for file in found}) < len(found):
            twice = next(file for file in found if file not in same.values())
            raise UserError(
                f"{twice}: the same file as {same[twice.resolve()]}: remove one of these links"
            )
        return found
    if packed := [file for file in below if file.suffix == ".parquet"]:
        raise UserError(
            f"{packed[0]}: Parquet is packed and cannot be mapped: unpack it once, "
            "datasets.load_dataset('parquet', data_files=FILES)['train'].save_to_disk(FOLDER)"
        )
    raise UserError(f"data.path {data.path!r}: no .bin, .ds or .arrow file there")


def _below(folder: Path, data: Data) -> Iterator[Path]:
    """Yield the files of a folder and those below it; of what `datasets` saved, its own list."""
    if (folder / "dataset_dict.json").is_file():
        names = sorted(_saved(folder / "dataset_dict.json", "splits"))
        split = data.split or "train"
        if split not in names:
            has = f"it has {', '.join(names)}"
            raise UserError(f"{folder}: no split {split!r} ({has}): set data.split")
        yield from _below(folder / split, data)
    elif (folder / "state.json").is_file():
        for file in _saved(folder / "state.json", "_data_files"):
            yield folder / file["filename"]
    else:
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from _below(path, data)
            else:
                yield path


def _saved(path: Path, key: str) -> Any:
    try:
        return read_json(path)[key]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not as datasets saves it: save the dataset again") from None


def read_layout(path: Path, column: str, vocabulary: int) -> TokenLayout:
    """Return where the tokens of a file are, by its header, its index or its columns.

    Args:
        column: of a file that `datasets` saved.
        vocabulary: says how wide tokens are in a file that does not: 16 bits where they suffice.

    Raises:
        UserError: the file is none of these, or damaged.
    """
    if path.suffix == ".arrow":
        return _arrow(path, column)
    # beside a link, or beside the file that it leads to
    for beside in (path, path.resolve()):
        if (index := beside.with_suffix(".idx")).is_file() and path.suffix == ".bin":
            return _megatron(path, index)
        if (index := beside.with_name(f"{beside.name}.index")).is_file():
            return _refuse_halves(path, _datatrove(path, index))
    return _refuse_halves(path, _plain(path, "uint16" if vocabulary <= 1 << 16 else "uint32"))


def scan(path: Path, layout: TokenLayout, vocabulary: int, end: int) -> tuple[int, np.ndarray]:
    """Read all tokens once; return the largest, and the ends of the documents in tokens.

    The end-of-text token stands behind each document, or before each in a file that begins but
    does not end with one.

    Raises:
        UserError: a token is not in the vocabulary.
    """
    largest, before = 0, 0
    found = [np.empty(0, np.int64)]
    for array in map_ranges(path, layout.dtype, layout.ranges):
        for start in range(0, len(array), _CHUNK):
            part = array[start : start + _CHUNK]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= vocabulary:
                raise UserError(
                    f"{path}: token {low if low < 0 else high}, where the vocabulary has "
                    f"{vocabulary}: set tokenize.tokenizer (or tokenize.vocabulary) to that which "
                    "the tokens were made with"
                )
            largest = max(largest, high)
            if layout.ends is None:
                found.append(np.flatnonzero(part == end) + before)
            before += len(part)
    if layout.ends is not None:
        return largest, layout.ends
    at = np.concatenate(found)
    begins = len(at) > 0 and at[0] == 0 and at[-1] != before - 1
    ends = at[1:] if begins else at + 1
    open_end = before > 0 and (not len(ends) or ends[-1] != before)
    return largest, np.append(ends, before) if open_end else ends


def _plain(path: Path, dtype: str) -> TokenLayout:
    size = path.stat().st_size
    head = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0)[:3]
    start = 0
    if head[0] in {magic for magic, _ in _LLM_C} and head[:2] not in _LLM_C:
        raise UserError(
            f"{path}: a header of llm.c of version {head[1]}, which is not known: "
            "write it by a version that is"
        )
    if head[:2] in _LLM_C:
        start, dtype = 1024, _LLM_C[head[:2]]
        if start + head[2] * np.dtype(dtype).itemsize != size:
            raise UserError(f"{path}: damaged: its header says {head[2]} tokens of {dtype}")
    count, rest = divmod(size - start, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{path}: damaged: {size} bytes are no whole number of {dtype} tokens")
    return TokenLayout(dtype, [[start, count]] if count else [], None)


def _refuse_halves(path: Path, layout: TokenLayout) -> TokenLayout:
    """Return a layout whose width is a guess, unless it takes the halves of 32 bits for tokens."""
    if layout.dtype == "uint16" and sum(count for _, count in layout.ranges) > 1:
        # the upper halves of small numbers
        [first, *_] = map_ranges(path, layout.dtype, layout.ranges)
        if not first[1:_CHUNK:2].any():
            raise UserError(
                f"{path}: every second number of 16 bits is 0, so tokens have 32: write them as "
                "uint16, or give the index or the header that says so"
            )
    return layout


def _megatron(path: Path, index: Path) -> TokenLayout:
    raw = index.read_bytes()
    head = _MEGATRON.unpack_from(raw) if len(raw) >= _MEGATRON.size else (b"",) * 5
    magic, version, code, sequences, documents = head
    dtype = _MEGATRON_TYPES.get(code)
    if (magic, version) != (b"MMIDIDX\x00\x00", 1) or dtype is None:
        raise _mismatch(path, index)
    at = _MEGATRON.size + 12 * sequences
    if len(raw) - at - 8 * documents not in (0, sequences):  # a byte each where there are modes
        raise _mismatch(path, index)
    lengths = np.frombuffer(raw, "<i4", sequences, _MEGATRON.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _MEGATRON.size + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, at)
    edges = np.append(0, np.cumsum(lengths, dtype=np.int64))
    size = np.dtype(dtype).itemsize
    if not (
        (lengths >= 0).all()
        and edges[-1] * size == path.stat().st_size
        and np.array_equal(pointers, edges[:-1] * size)
        and len(bounds)
        and bounds[0] == 0
        and bounds[-1] == sequences
        and (np.diff(bounds) >= 0).all()
    ):
        raise _mismatch(path, index)
    return TokenLayout(dtype, [[0, int(edges[-1])]] if edges[-1] else [], edges[bounds[1:]])


def _datatrove(path: Path, index: Path) -> TokenLayout:
    ends, size = np.fromfile(index, "<i8"), path.stat().st_size
    count = int(ends[-1]) if len(ends) else 0
    width = size / count if count else 2 + size
    if width not in (2, 4) or (np.diff(ends, prepend=0) < 0).any():
        raise _mismatch(path, index)
    return TokenLayout(f"uint{int(8 * width)}", [[0, count]] if count else [], ends)


def _mismatch(path: Path, index: Path) -> UserError:
    return UserError(
        f"{index}: does not match {path.name}: give both as they were written, of whole numbers"
    )


def _arrow(path: Path, column: str) -> TokenLayout:
    """Return the stretches that the record batches hold; a row is a document."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(
            f"{path}: needs the datasets package: pip install 'shardlab[datasets]'"
        ) from None
    whole = pa.memory_map(str(path)).read_buffer()
    dtype, ranges, lengths = "int64", [], [np.empty(0, np.int64)]
    try:
        for batch in pa.ipc.open_stream(whole):
            names = batch.schema.names
            if column not in names:
                has = f"it has {', '.join(names)[:200]}"
                raise UserError(f"{path}: no column {column!r} ({has}): set data.ids_column")
            rows = batch.column(column)
            values = _ids(path, column, rows)
            dtype = str(np.dtype(values.type.to_pandas_dtype()))
            lengths.append(rows.value_lengths().to_numpy(zero_copy_only=False))
            if not len(values):
                continue
            start = values.buffers()[1].address - whole.address
            if not 0 <= start <= whole.size:
                raise UserError(f"{path}: packed record batches cannot be mapped: save it again")
            ranges.append([start + values.offset * values.type.bit_width // 8, len(values)])
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: not a file that datasets saved ({reason})") from None
    return TokenLayout(dtype, ranges, np.cumsum(np.concatenate(lengths)))


def _ids(path: Path, column: str, rows: Any) -> Any:
    """Return the ids of a column of lists, one after another, without a copy."""
    import pyarrow.types as kinds

    lists = kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list
    if not any(each(rows.type) for each in lists) or not kinds.is_integer(rows.type.value_type):
        raise UserError(
            f"{path}: column {column!r} holds {rows.type}, no lists of ids: set data.ids_column"
        )
    values = rows.flatten()
    if rows.null_count or values.null_count:
        raise UserError(
            f"{path}: column {column!r}: a row without ids, or an id that is null: leave it out"
        )
    return values
