"""A placement for a person: as text and as a picture, large ones folded."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hpctrain.cli import app
from hpctrain.config import parse
from hpctrain.errors import PlanError
from hpctrain.plan import placement_picture, placement_text
from hpctrain.plan.links import linked
from hpctrain.plan.machines import find, topology_of
from hpctrain.plan.place import Placement, compare
from hpctrain.plan.plan import decide
from hpctrain.plan.topology import Level, Topology
from hpctrain.plan.traffic import Flow

ROOT = Path(__file__).parents[2]
CHOSEN = parse({"model": {"layers": 2, "width": 64, "heads": 4, "sequence": 128}, "train": {"batch": 32},
                "parallel": {"tp": 2}})  # fmt: skip
CYCLIC = Topology(tuple("abcd" * 2), (Level.of("switch", "sstt" * 2),))


def placed(topology: Topology) -> Placement:
    return decide(CHOSEN, topology, 300).placement


def test_each_node_has_a_line_with_its_ranks_and_their_places() -> None:
    lines = placement_text.text(CYCLIC, placed(CYCLIC)).splitlines()
    assert lines[:7] == [
        "ranks and their places along dp, tp:",
        "switch 1",
        "  a  0:0.0  4:0.1",
        "  b  1:1.0  5:1.1",
        "switch 2",
        "  c  2:2.0  6:2.1",
        "  d  3:3.0  7:3.1",
    ]
    assert re.fullmatch(
        r"along tp: 4 groups of 2 ranks, each on one node; a rank sends [\d.]+ MiB of activations a step", lines[7]
    )
    assert lines[8].startswith("along dp: 2 groups of 4 ranks, across nodes; a rank sends ")
    assert re.fullmatch(r"leaving a node: [\d.]+ [KM]iB a step, and [\d.]+ MiB in the order given", lines[9])
    assert lines[10].startswith("leaving a switch: ")
    assert len(lines) == 11  # no seconds: nobody said how fast any link is


def test_known_links_tell_seconds() -> None:
    topology = linked(CYCLIC, find("lab"))
    assert "links are busy for " in placement_text.text(topology, placed(topology))


@pytest.mark.parametrize(
    ("nodes", "last"), [(17, "  ... 1 more node like these"), (1040, "  ... 1,024 more nodes like these")]
)
def test_many_nodes_are_folded(nodes: int, last: str) -> None:
    topology = topology_of(find("frontier"), nodes, 8)
    mesh = decide(
        CHOSEN.model_copy(update={"train": CHOSEN.train.model_copy(update={"batch": nodes * 4})}), topology, 300
    )
    lines = placement_text.text(topology, mesh.placement).splitlines()
    assert last in lines
    assert len(lines) < 30


def test_where_groups_are_is_told_for_each_axis() -> None:
    uneven = Topology(tuple("aaaaabbb"))
    mesh = decide(CHOSEN, uneven, 300).mesh
    flow = Flow("tp", ("tp",), 1)
    assert placement_text.where(uneven, mesh, ("tp",), flow) == "tp: 4 groups of 2 ranks, 3 of them on one node"
    assert placement_text.where(CYCLIC, mesh, ("dp",), flow).endswith("across nodes")


def test_the_picture_has_a_square_for_each_rank_in_a_panel_for_each_axis() -> None:
    drawn = placement_picture.svg(CYCLIC, placed(CYCLIC), "eight & ranks")
    root = ElementTree.fromstring(drawn)
    names = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert names[0] == "eight & ranks"
    assert sorted(names[1:]) == sorted(f"rank {r}: dp {r % 4}, tp {r // 4}" for r in range(8) for _ in ("tp", "dp"))
    squares = re.findall(r'rank (\d): [^<]*</title><rect [^>]*fill="(#\w+)"', drawn)
    first = dict(squares[:8])  # along tp: ranks of a group, and they alone, have one colour
    assert first["0"] == first["4"] and len(set(first.values())) == 4
    assert len(set(dict(squares[8:]).values())) == 2
    assert drawn == placement_picture.svg(CYCLIC, placed(CYCLIC), "eight & ranks")


def test_a_picture_of_many_nodes_tells_how_many_are_left() -> None:
    topology = topology_of(find("frontier"), 100, 2)
    flows = (Flow("dp", ("dp",), 1),)
    mesh = decide(
        CHOSEN.model_copy(update={"train": CHOSEN.train.model_copy(update={"batch": 200})}), topology, 300
    ).mesh
    assert "and 36 more nodes like these" in placement_picture.svg(topology, compare(topology, mesh, flows), "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p.png", "{path} is not a name for this picture\n  a placement is drawn as SVG\n  let it end in .svg"),
        ("none/p.svg", "{path} cannot be written: [Errno 2] No such file or directory: '{path}'\n"
         "  a picture goes there\n  name a file in a folder that is there"),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_written_says_why(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(PlanError) as caught:
        placement_picture.save(path, CYCLIC, placed(CYCLIC), "")
    assert str(caught.value) == message.format(path=path)


def test_the_command_shows_and_draws(tmp_path: Path) -> None:
    words = ["plan", str(ROOT / "configs/tiny-3d.toml"), "--machine", "lab", "--nodes", "2"]
    more = ["--show-placement", "--svg", str(tmp_path / "p.svg")]
    done = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    assert done.exit_code == 0
    assert "ranks and their places along pp, dp, tp:" in done.stdout
    assert (tmp_path / "p.svg").read_text().count("rank 7: ") == 3
    assert "places along" not in CliRunner().invoke(app, words, catch_exceptions=False).stdout
