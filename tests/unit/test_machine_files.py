"""The machine files that come with hpctrain: each figure has its source, and they fit together."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.plan.machines import describe, find

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs/machines").glob("*.toml"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

# Names that a file gives, and what is no fact of a site.
FREE = re.compile(r"(name|site|device\.name|device\.kind|links\[\d+\]\.name|sources\..*)$")


def test_there_are_files() -> None:
    assert {"frontier", "perlmutter", "dgx-h100", "laptop", "lab"} <= {path.stem for path in FILES}


@every_file
def test_every_file_loads(path: Path) -> None:
    assert find(path).name


@every_file
def test_every_figure_has_a_source_that_is_named(path: Path) -> None:
    found = describe(path)
    lacking = [one.key for one in found.values if not FREE.match(one.key) and not one.tags]
    unknown = {tag for one in found.values for tag in one.tags} - {*found.machine.sources}
    assert (lacking, unknown) == ([], set())


@every_file
def test_every_source_is_of_some_figure(path: Path) -> None:
    found = describe(path)
    assert {*found.machine.sources} == {tag for one in found.values for tag in one.tags}


@every_file
def test_every_line_with_a_figure_has_a_tag_of_its_own(path: Path) -> None:
    """As a person reads the file, without the parser."""
    facts = path.read_text().partition("\n[sources]\n")[0].splitlines()
    lines = [line for line in facts if re.search(r"[\d\]}\"]|true|false", line.partition("#")[0])]
    free = re.compile(r'\[+[\w.-]+\]+$|\]|(name|site|kind = "(cuda|rocm|xpu|cpu)")')
    assert [line for line in lines if not free.match(line) and not re.search(r"  # \[[a-z0-9-]+\]", line)] == []


@every_file
def test_what_is_printed_is_what_the_file_says(path: Path) -> None:
    raw = tomllib.loads(path.read_text())
    for one in describe(path).values:
        value = raw
        for part in re.findall(r"[^.\[\]]+", one.key):
            value = value[int(part) if isinstance(value, list) else part]
        assert value == one.value


@every_file
def test_seats_are_those_of_the_devices(path: Path) -> None:
    node = find(path).node
    cores = [core for seat in node.seats for core in seat.core_numbers]
    assert len(node.seats) in (0, node.devices)
    assert len(cores) == len(set(cores))
    assert set(cores) <= set(range(node.cores * node.threads_per_core))


@every_file
def test_a_rank_gets_no_more_cores_than_jobs_have(path: Path) -> None:
    machine = find(path)
    usable = machine.node.usable_cores or machine.node.cores
    assert usable <= machine.node.cores
    each = machine.batch.cpus_per_task or 1
    assert each * machine.node.devices <= usable * machine.node.threads_per_core


@every_file
def test_links_widen_and_get_no_faster(path: Path) -> None:
    machine = find(path)
    widths = [link.devices or (link.nodes or 10**9) * machine.node.devices for link in machine.links]
    rates = [link.gb_per_second for link in machine.links]
    assert all(near < far for near, far in pairwise(widths))
    assert all(near >= far for near, far in pairwise(rates))
    assert machine.nodes == 1 or machine.links[-1].nodes is machine.links[-1].devices is None


@every_file
def test_a_pair_of_devices_is_no_faster_than_all_pairs_together(path: Path) -> None:
    assert all((link.pair_gb_per_second or 0) <= link.gb_per_second for link in find(path).links)


def test_what_is_remembered_only_is_told() -> None:
    assert "scratch.path" in describe("dgx-h100").unchecked
    assert describe("frontier").unchecked == ()


def test_a_module_of_frontier_is_two_devices_on_one_numa_domain() -> None:
    seats = find("frontier").node.seats
    assert [seat.numa for seat in seats] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert all(len(seat.core_numbers) == 7 and seat.core_numbers[0] % 8 == 1 for seat in seats)


def test_the_lab_is_the_one_that_slurm_lab_makes() -> None:
    machine = find("lab")
    assert f"{machine.nodes} nodes of {machine.node.cores} processors and {machine.node.devices} GPUs" in (
        ROOT / "slurm/lab/README.md"
    ).read_text().replace("each", "")
