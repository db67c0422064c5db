"""A schedule as a file: SVG by our own hand, PNG with matplotlib where that is installed.

A row for each rank, time from left to right. A cell's colour is its op, a paler one is a later stage of the rank; its
number is the micro-batch. What stays grey is bubble.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from hpctrain.errors import PlanError
from hpctrain.schedule.action import OPS
from hpctrain.schedule.draw import COLOURS, Cell, cells
from hpctrain.schedule.simulate import Timeline

CELL, ROW, GAP = 24.0, 26, 4  # pixels: the shortest cell's width at most, a row's height, what is left between rows
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 40, 34
WIDEST = 2400.0
IDLE, INK, QUIET = "#eceef1", "#1b2733", "#66717d"

STYLE = (
    f"text{{font:11px system-ui,sans-serif;fill:{INK}}}.c{{text-anchor:middle;dominant-baseline:central}}"
    f".t{{font-size:14px;font-weight:600}}.q{{fill:{QUIET}}}"
)


def save(path: Path, timeline: Timeline, title: str) -> None:
    """Write the picture to ``path``, in the format that its name ends in."""
    if path.suffix not in FORMATS:
        what = f"{path} is not a name for a picture"
        raise PlanError(what, "its ending says what it will be", f"let it end in {' or '.join(FORMATS)}")
    made = FORMATS[path.suffix](timeline, title)
    try:
        path.write_bytes(made)
    except OSError as error:
        what = f"{path} cannot be written: {error}"
        raise PlanError(what, "a picture goes there", "name a file in a folder that is there") from None


# ---- SVG


def svg(timeline: Timeline, title: str) -> str:
    """The picture as SVG; the same timeline and title give the same text."""
    scale = _scale(timeline)
    right = LEFT + timeline.makespan * scale
    width, height = right + RIGHT, TOP + ROW * len(timeline.schedule.ranks) + BOTTOM
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {height}" width="{_n(width)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{_n(width)}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="{LEFT}" y="22">{escape(title)}</text>',
        f'<text class="q" x="{_n(right)}" y="22" text-anchor="end">{_numbers(timeline)}</text>',
        *_rows(timeline, scale),
        *_legend(timeline, height),
        "</svg>\n",
    ))  # fmt: skip


def _scale(timeline: Timeline) -> float:
    """Pixels for a unit of time."""
    shortest = min((cell.end - cell.begin for cell in cells(timeline)), default=1.0)
    return min(CELL / shortest, WIDEST / max(timeline.makespan, shortest))


def _numbers(timeline: Timeline) -> str:
    return f"time {timeline.makespan:.6g}, bubble {timeline.bubble:.1%}"


def _rows(timeline: Timeline, scale: float) -> Iterator[str]:
    of_rank = {rank: list(found) for rank, found in groupby(cells(timeline), key=lambda cell: cell.rank)}
    for rank in range(len(timeline.schedule.ranks)):
        yield f'<g transform="translate({LEFT} {TOP + ROW * rank})">'
        yield f'<text class="q" x="{-LEFT + 10}" y="{ROW / 2 + 2:g}">rank {rank}</text>'
        yield f'<rect width="{_n(timeline.makespan * scale)}" height="{ROW - GAP}" fill="{IDLE}"/>'
        yield from (_cell(cell, scale) for cell in of_rank.get(rank, ()))
        yield "</g>"


def _cell(cell: Cell, scale: float) -> str:
    start, width = cell.begin * scale, (cell.end - cell.begin) * scale
    number = str(cell.action.microbatch)
    label = f'<text class="c" x="{_n(start + width / 2)}" y="{(ROW - GAP) / 2:g}">{number}</text>'
    return (
        f'<g><title>{cell.action}</title><rect x="{_n(start)}" width="{_n(width)}" height="{ROW - GAP}" '
        f'fill="{cell.colour}" stroke="#fff"/>{label if width > 7 * len(number) else ""}</g>'
    )


def _legend(timeline: Timeline, height: int) -> Iterator[str]:
    """What the colours are that occur."""
    found = list(cells(timeline))
    used = {cell.action.op for cell in found}
    entries = [(COLOURS[op], OPS[op].split(":")[0]) for op in COLOURS if op in used] + [(IDLE, "waiting")]
    later = next((cell.colour for cell in reversed(found) if cell.chunk), None)
    entries += [(later, "paler: a later stage of the rank")] if later else []
    x = float(LEFT)
    for colour, words in entries:
        yield f'<rect x="{_n(x)}" y="{height - 24}" width="12" height="12" fill="{colour}"/>'
        yield f'<text class="q" x="{_n(x + 18)}" y="{height - 14}">{words}</text>'
        x += 34 + 6.0 * len(words)


def _n(number: float) -> str:
    """A number of pixels, to a tenth, without zeros that say nothing."""
    return f"{number:.1f}".removesuffix(".0")


# ---- PNG


def png(timeline: Timeline, title: str) -> bytes:
    """The picture as PNG. PlanError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        mend = "pip install 'hpctrain[report]', or let the name end in .svg"
        raise PlanError("no PNG without matplotlib", "it is not installed", mend) from None
    ranks, scale = len(timeline.schedule.ranks), _scale(timeline)
    size = (LEFT + timeline.makespan * scale + RIGHT, TOP + ROW * ranks + BOTTOM)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=144, layout="constrained")
    axes = figure.add_subplot(xlim=(0, timeline.makespan), ylim=(ranks - 0.5, -0.5), title=title, facecolor=IDLE)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    for cell in cells(timeline):
        length = cell.end - cell.begin
        axes.barh(cell.rank, length, left=cell.begin, height=0.86, color=cell.colour, edgecolor="white", linewidth=0.5)
        if length * scale > 7 * len(str(cell.action.microbatch)):
            axes.text(cell.begin + length / 2, cell.rank, cell.action.microbatch, ha="center", va="center", fontsize=8)
    made = io.BytesIO()
    figure.savefig(made, format="png")
    return made.getvalue()


FORMATS: dict[str, Callable[[Timeline, str], bytes]] = {
    ".svg": lambda timeline, title: svg(timeline, title).encode(),
    ".png": png,
}
