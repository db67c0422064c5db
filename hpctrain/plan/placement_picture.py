"""A placement as a picture (SVG): nodes side by side, those of one switch in a frame, a square for each rank.

There is a panel for each axis along which something travels. In it, ranks of one group have one colour: where an axis
is well placed, a node is of few colours and a colour on few nodes.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hpctrain.errors import PlanError
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.place import Placement
from hpctrain.plan.placement_text import Cluster, clusters, where
from hpctrain.plan.topology import Topology
from hpctrain.plan.traffic import Flow
from hpctrain.schedule.picture import INK, QUIET, STYLE

SHOWN = 64  # nodes that are drawn
CELL_WIDTH, CELL_HEIGHT, GAP, PAD, LABEL = 34, 24, 2, 6, 16  # pixels
ACROSS, NODES_ACROSS = 8, 4  # ranks beside each other in a node, and nodes in a frame
LEFT, TOP, HEAD = 14, 40, 26
GOLDEN = 0.618034  # of a turn between the hues of two groups that follow one another: near ones look unlike


def save(path: Path, topology: Topology, placement: Placement, title: str) -> None:
    """Write the picture; its name ends in .svg."""
    if path.suffix != ".svg":
        what = f"{path} is not a name for this picture"
        raise PlanError(what, "a placement is drawn as SVG", "let it end in .svg")
    try:
        path.write_text(svg(topology, placement, title), encoding="utf-8")
    except OSError as error:
        what = f"{path} cannot be written: {error}"
        raise PlanError(what, "a picture goes there", "name a file in a folder that is there") from None


def svg(topology: Topology, placement: Placement, title: str) -> str:
    """The picture as SVG; the same placement and title give the same text."""
    found, left = clusters(topology, SHOWN)
    node = _node_size(topology, found)
    panel = HEAD + sum(_frame_height(cluster, node) + PAD for cluster in found) + (LABEL if left else 0)
    flows = list({flow.axes: flow for flow in reversed(placement.flows)}.values())[::-1]
    columns = min(NODES_ACROSS, max(len(cluster.nodes) for cluster in found))
    width = max(2 * LEFT + columns * (node[0] + PAD) + PAD, 12 * len(title) // 2 + 2 * LEFT, 560)
    height = TOP + len(flows) * (panel + PAD)
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="{LEFT}" y="22">{escape(title)}</text>',
        *(
            line
            for number, flow in enumerate(flows)
            for line in _panel(topology, placement.mesh, flow, found, left, node, TOP + number * (panel + PAD))
        ),
        "</svg>\n",
    ))  # fmt: skip


Size = tuple[int, int]


def _node_size(topology: Topology, found: list[Cluster]) -> Size:
    most = max(len(topology.ranks_of(node)) for cluster in found for node in cluster.nodes)
    rows = -(-most // ACROSS)
    return min(most, ACROSS) * (CELL_WIDTH + GAP) + PAD, rows * (CELL_HEIGHT + GAP) + LABEL + PAD


def _frame_height(cluster: Cluster, node: Size) -> int:
    return (LABEL if cluster.title else 0) + -(-len(cluster.nodes) // NODES_ACROSS) * (node[1] + PAD) + PAD


def _panel(
    topology: Topology, mesh: Mesh, flow: Flow, found: list[Cluster], left: int, node: Size, top: int
) -> Iterator[str]:
    yield f'<g transform="translate({LEFT} {top})">'
    yield f'<text y="14">along {escape(where(topology, mesh, flow.axes, flow))}</text>'
    y = HEAD
    for cluster in found:
        yield from _frame(topology, mesh, flow, cluster, node, y)
        y += _frame_height(cluster, node) + PAD
    if left:
        yield f'<text class="q" y="{y + 8}">and {left:,} more nodes like these</text>'
    yield "</g>"


def _frame(topology: Topology, mesh: Mesh, flow: Flow, cluster: Cluster, node: Size, y: int) -> Iterator[str]:
    columns, head = min(NODES_ACROSS, len(cluster.nodes)), LABEL if cluster.title else 0
    if cluster.title:
        size = f'width="{columns * (node[0] + PAD) + PAD}" height="{_frame_height(cluster, node)}"'
        yield f'<rect y="{y}" {size} fill="none" stroke="{QUIET}" stroke-dasharray="3 3" rx="4"/>'
        yield f'<text class="q" x="{PAD}" y="{y + 13}">{escape(cluster.title)}</text>'
    for place, number in enumerate(cluster.nodes):
        row, column = divmod(place, NODES_ACROSS)
        at = PAD + column * (node[0] + PAD), y + head + PAD + row * (node[1] + PAD)
        yield from _node(topology, mesh, flow, number, node, at)


def _node(topology: Topology, mesh: Mesh, flow: Flow, number: int, node: Size, at: Size) -> Iterator[str]:
    yield f'<g transform="translate({at[0]} {at[1]})">'
    yield f'<rect width="{node[0]}" height="{node[1]}" fill="#f7f8f9" stroke="#cfd5da" rx="3"/>'
    yield f'<text class="q" x="{PAD}" y="12">{escape(topology.nodes[number])}</text>'
    for place, rank in enumerate(topology.ranks_of(number)):
        row, column = divmod(place, ACROSS)
        yield _square(mesh, flow, rank, PAD // 2 + column * (CELL_WIDTH + GAP) + 1, LABEL + row * (CELL_HEIGHT + GAP))
    yield "</g>"


def _square(mesh: Mesh, flow: Flow, rank: int, x: int, y: int) -> str:
    others = [name for name, _ in mesh.axes if name not in flow.axes]
    coords = ", ".join(f"{name} {at}" for name, at in mesh.coord(rank).items())
    colour, label = _colour(mesh.index(rank, *others)), f"{rank:,}" if rank < 10_000 else f"{rank / 1000:.0f}k"
    return (
        f'<g><title>rank {rank}: {coords}</title><rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" '
        f'fill="{colour}" stroke="#fff"/><text class="c" x="{x + CELL_WIDTH / 2:g}" y="{y + CELL_HEIGHT / 2:g}" '
        f'fill="{INK}">{label}</text></g>'
    )


def _colour(group: int) -> str:
    """A pale colour for each group; those of neighbouring numbers differ most."""
    parts = colorsys.hls_to_rgb(0.58 + group * GOLDEN, 0.80 - 0.06 * (group % 3), 0.62)
    return "#" + bytes(round(255 * part) for part in parts).hex()
