"""The pictures of docs/architecture.md as SVG text, the same bytes on every machine.

    python docs/pictures/draw.py

writes them beside this script. The layers are read from the import contract in pyproject.toml.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 800
MARGIN = 14
INK, FAINT = "#1b1f24", "#57606a"
CODE, FILE, BAND = "#dbe9ff", "#fff3cd", "#f3f4f6"
FONT = "'DejaVu Sans', Verdana, Helvetica, sans-serif"

BANDS = {
    "commands": "stages",
    "read records": "shardlab.report",
    "run and measure": "shardlab.timing",
    "train": "shardlab.train.checkpoint",
    "communicate": "shardlab.comm",
    "traces, text, models": "shardlab.profiling",
    "memory model": "shardlab.memory",
    "records, machine": "shardlab.collection",
    "specification": "shardlab.experiment",
    "base": "shardlab.core",
}
"""rows of the picture of layers, each with its first package in the order of the contract"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and smaller lines below it; positions in pixels."""

    title: str
    lines: tuple[str, ...] = ()
    fill: str = CODE
    x: float = 0
    y: float = 0
    width: float = 136
    height: float = 62

    def at(self, x: float, y: float, width: float | None = None) -> "Box":
        """Return the same box at another place."""
        size = self.width if width is None else width
        return Box(self.title, self.lines, self.fill, x, y, size, self.height)

    def svg(self) -> str:
        """Return the rectangle and its centred text."""
        middle = self.x + self.width / 2
        radius = 3 if self.fill == FILE else 8
        parts = [
            f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="{radius}" fill="{self.fill}" stroke="{INK}"/>'
        ]
        top = self.y + self.height / 2 + 5 - 8 * len(self.lines)
        parts.append(text(middle, top, self.title, size=13, weight="bold"))
        for number, line in enumerate(self.lines, 1):
            parts.append(text(middle, top + 16 * number, line, size=11, color=FAINT))
        return "\n".join(parts)


@dataclass
class Picture:
    """A white page with a title for screen readers and boxes, arrows and text on it."""

    title: str
    height: float
    parts: list[str] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Draw on top of everything so far."""
        self.parts += parts

    def svg(self) -> str:
        """Return the whole document."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" '
                f'width="{WIDTH}" height="{self.height:g}" font-family="{FONT}" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker>'
                "</defs>",
                # pages with a dark background show the same picture
                '<rect width="100%" height="100%" fill="white"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    color: str = INK,
    anchor: str = "middle",
    weight: str = "normal",
) -> str:
    """Return one line of text; `y` is its base line."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """Return a line through the points with a head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{dash} '
        'marker-end="url(#head)"/>'
    )


def right_of(box: Box) -> tuple[float, float]:
    """Return the middle of the right side."""
    return box.x + box.width, box.y + box.height / 2


def left_of(box: Box) -> tuple[float, float]:
    """Return the middle of the left side."""
    return box.x, box.y + box.height / 2


def top_of(box: Box) -> tuple[float, float]:
    """Return the middle of the upper side."""
    return box.x + box.width / 2, box.y


def bottom_of(box: Box) -> tuple[float, float]:
    """Return the middle of the lower side."""
    return box.x + box.width / 2, box.y + box.height


def row(boxes: Sequence[Box], y: float, leftwards: bool = False) -> list[Box]:
    """Place boxes side by side over the whole width, the first one on the right if `leftwards`."""
    gap = (WIDTH - 2 * MARGIN - sum(box.width for box in boxes)) / (len(boxes) - 1)
    placed, x = [], float(MARGIN)
    for box in reversed(boxes) if leftwards else boxes:
        placed.append(box.at(x, y))
        x += box.width + gap
    return placed[::-1] if leftwards else placed


def serpentine(picture: Picture, rows: Sequence[Sequence[Box]], top: float, step: float) -> None:
    """Draw rows of boxes, read to the right and to the left alternately, joined by arrows."""
    before: Box | None = None
    for number, boxes in enumerate(rows):
        backwards = number % 2 == 1
        placed = row(boxes, top + number * step, backwards)
        if before is not None:
            picture.add(arrow(bottom_of(before), top_of(placed[0])))
        for one, other in pairwise(placed):
            ends = (left_of(one), right_of(other)) if backwards else (right_of(one), left_of(other))
            picture.add(arrow(*ends))
        picture.add(*(box.svg() for box in placed))
        before = placed[-1]


def contract() -> list[str]:
    """Return the layers of the import contract, from the top down; siblings one after another."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    return [name.strip(" ()") for layer in layers for name in layer.replace(":", "|").split("|")]


def bands(packages: Sequence[str]) -> dict[str, list[str]]:
    """Return the packages of each row of the picture of layers.

    Raises:
        ValueError: a row begins with a package that the contract lacks.
    """
    starts = [packages.index(first) for first in BANDS.values()]
    ends = [*starts[1:], len(packages)]
    return {
        name: list(packages[start:end])
        for name, start, end in zip(BANDS, starts, ends, strict=True)
    }


def layers() -> Picture:
    """Draw packages in the order of the import contract."""
    step, height, left = 58.0, 38.0, 150.0
    found = bands(contract())
    picture = Picture("The packages, from the top down", 46 + step * len(found))
    picture.add(
        text(WIDTH / 2, 24, "Imports only point down, and to the right within a row", color=FAINT)
    )
    for number, (name, packages) in enumerate(found.items()):
        y = 42 + step * number
        picture.add(
            f'<rect x="{MARGIN}" y="{y:g}" width="{WIDTH - 2 * MARGIN}" height="{height:g}" '
            f'rx="8" fill="{BAND}"/>',
            text(MARGIN + 10, y + 24, name, anchor="start", color=FAINT),
        )
        pitch = (WIDTH - MARGIN - 8 - left) / len(packages)
        for index, package in enumerate(packages):
            x, width = left + 8 + index * pitch, pitch - 8
            title = package.removeprefix("shardlab.")
            picture.add(
                f'<rect x="{x:g}" y="{y + 5:g}" width="{width:g}" height="{height - 10:g}" rx="6" '
                f'fill="{CODE}" stroke="{INK}"/>',
                text(x + width / 2, y + 23, title, size=12 if len(packages) < 6 else 11),
            )
        if number:
            picture.add(arrow((WIDTH / 2, y - step + height + 2), (WIDTH / 2, y - 2)))
    return picture


def gradient() -> Picture:
    """Draw the gradient of one unit through a codec, from backward to the optimizer."""
    picture = Picture("The way of one gradient through a codec", 330)
    sends = [
        Box("backward", ("gradients of", "one unit")),
        Box("hook", ("flat vector,", "one chunk per rank")),
        Box("error feedback", ("chunk + residual",)),
        Box("encode", ("Codec.encode:", "uint8 payload")),
    ]
    receives = [
        Box("all-to-all", ("chunk i to rank i;", "ledger counts bytes")),
        Box("decode_add", ("sum of W payloads", "in float32")),
        Box("mean", ("sum / W",)),
        Box("optimizer", ("AdamW on", "the shard")),
    ]
    picture.add(
        text(MARGIN, 30, "every rank, as sender", anchor="start", color=FAINT),
        text(MARGIN, 316, "every rank, as owner of one shard", anchor="start", color=FAINT),
    )
    feedback, encode = (top_of(box) for box in row(sends, 84)[2:4])
    # what the payload does not hold goes back, for the next gradient of the unit
    picture.add(
        text((encode[0] + feedback[0]) / 2, 52, "residual = vector - decoded payload", size=11),
        arrow(encode, (encode[0], 58), (feedback[0], 58), feedback, dashed=True),
    )
    serpentine(picture, [sends, receives], top=84, step=140)
    return picture


def parameter() -> Picture:
    """Draw one parameter of params.yaml on its way to a record and the report."""
    picture = Picture("From a parameter to a record", 252)
    down = [
        Box("params.yaml", ("strategies.NAME",), FILE),
        Box("schema", ("types, unknown keys,", "one-line errors")),
        Box("strategy", ("validation, canonical", "form, hash")),
        Box("plan", ("run, seed, strategy,", "train, model")),
        Box("stage", ("python -m", "stages.train")),
    ]
    back = [
        Box("engine", ("built from the", "strategy; all ranks")),
        Box("metrics.json", ("of one run", "and seed"), FILE),
        Box("collect", ("joins timings, traces", "validation, memory")),
        Box("results.jsonl", ("one record per", "run and seed"), FILE),
        Box("report", ("tables, plots,", "headline")),
    ]
    serpentine(picture, [down, back], top=28, step=128)
    return picture


def search_round() -> Picture:
    """Draw one round of the search: three stages and the files between them."""
    picture = Picture("One round of the search", 384)
    width, height = 196.0, 118.0
    stages = [
        Box("propose", ("predicts all that is legal", "and fits in memory", "shortlist", "judge")),
        Box("trial", ("race of interleaved steps", "trains what is faster and", "may be worse")),
        Box("decide", ("faster, and as good:", "accept, else", "roll back")),
    ]
    files = [
        Box("proposal.json", ("shortlist, choice, arms",), FILE),
        Box("trial.json", ("steps, seeds, or failure",), FILE),
        Box("history.json", ("for the next round",), FILE),
    ]
    columns = [MARGIN + n * (WIDTH - 2 * MARGIN - width) / 2 for n in range(3)]
    known = Box(
        "results.jsonl, timings, calibration, history.json of the round before",
        ("all that was measured; rounds so far and the incumbent",),
        FILE,
    ).at(MARGIN, 24, WIDTH - 2 * MARGIN)
    boxes = [
        Box(each.title, each.lines, each.fill, x, 132, width, height)
        for each, x in zip(stages, columns, strict=True)
    ]
    written = [each.at(x, 304, width) for each, x in zip(files, columns, strict=True)]
    for reader in (boxes[0], boxes[2]):
        picture.add(arrow((top_of(reader)[0], 86), top_of(reader)))
    for box, file in zip(boxes, written, strict=True):
        picture.add(arrow(bottom_of(box), top_of(file)))
    for file, after in zip(written, boxes[1:], strict=False):
        x, y = right_of(file)
        picture.add(arrow((x, y), (x + 46, y), (x + 46, 191), left_of(after)))
    picture.add(*(box.svg() for box in (known, *boxes, *written)))
    return picture


PICTURES = {"layers": layers, "gradient": gradient, "parameter": parameter, "round": search_round}


def main() -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
