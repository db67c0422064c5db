"""``hpctrain machines``, and ``hpctrain plan`` on one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.cli import machines as command
from hpctrain.plan.machines import VARIABLE, describe, find, names

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/machines.md"


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("[model]\nlayers = 1\nwidth = 8\nheads = 2\nsequence = 4\nvocabulary = 16\n[train]\nbatch = 64\n")
    return path


# ---- machines


def test_the_list_has_a_line_for_each_machine(run) -> None:
    code, out, err = run("machines")
    head, *lines = out.splitlines()
    assert (code, err, head.split()[0]) == (0, "", "name")
    assert [line.split()[0] for line in lines] == [*names()]
    line = next(line for line in lines if line.startswith("frontier"))
    assert "9,856" in line and "8 x MI250X GCD, 64 GiB" in line and "module 200, node 50" in line


def test_the_list_as_json_has_the_figures(run) -> None:
    rows = {row["name"]: row for row in json.loads(run("machines", "--json")[1])}
    assert rows["frontier"]["links"] == {"module": 200, "node": 50, "group": 12.5, "machine": 12.5}
    assert (rows["dgx-h100"]["nodes"], rows["laptop"]["tflops"]) == (None, None)
    assert rows["marenostrum5"]["unchecked"] == len(describe("marenostrum5").unchecked) > 0


def test_a_machine_is_shown_with_its_sources(run) -> None:
    code, out, err = run("machines", "perlmutter")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err, lines[0]) == (0, "", "configs/machines/perlmutter.toml")
    assert "links[0].pair_gb_per_second 100 [unchecked] 4 links of NVLink 3" in lines
    assert "batch.environment.NCCL_CROSS_NIC 1 [podman]" in lines
    assert lines[-1] == f"[unchecked] {find('perlmutter').sources['unchecked']}"
    assert not [line for line in lines if line.startswith("sources.")]


def test_a_machine_as_json_has_its_values_and_what_stands_beside_them(run) -> None:
    found = json.loads(run("machines", str(ROOT / "configs/machines/frontier.toml"), "--json")[1])
    assert found["machine"]["node"]["seats"][0] == {"numa": 3, "cores": "49-55", "nic": None}
    assert found["beside"]["node.seats[0]"] == {"tags": ["olcf"], "word": ""}
    assert found["machine"]["sources"].keys() == {"olcf", "olcfc", "mle"}


def test_an_unknown_machine_is_wrong_use(run) -> None:
    code, out, err = run("machines", "fronteir")
    assert (code, out) == (2, "")
    assert err.startswith("hpctrain: no machine is called 'fronteir'\n  known are alps, ")


def test_a_file_without_sources_is_shown_too(tmp_path: Path, run) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ndevice = { name = "chip", kind = "cuda", memory_gib = 8 }\n'
        "node = { devices = 1, cores = 2, memory_gib = 4 }\n"
    )
    lines = [" ".join(line.split()) for line in run("machines", path)[1].splitlines()]
    assert lines[:3] == [str(path), "name mine", "device.name chip"]


def test_the_page_of_the_documentation_has_the_tables_as_they_are(run) -> None:
    out = run("machines", "--markdown")[1]
    parts = out.split("\n\n")
    assert len(parts) == 2
    assert all(part.strip() in PAGE.read_text() for part in parts), "write them anew: hpctrain machines --markdown"


def test_a_row_of_the_page_has_as_many_cells_as_its_head() -> None:
    head, line, *rows = (
        command.page([command.row(name, describe(name)) for name in names()]).split("\n\n")[0].split("\n")
    )
    assert {row.count(" | ") for row in (head, *rows)} == {len(command.HEADS) - 1}
    assert line.count("---") == len(command.HEADS)


def test_the_example_of_a_file_of_ones_own_is_whole(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "ours.toml").write_text(example)
    found = describe(tmp_path / "ours.toml")
    assert {tag for value in found.values for tag in value.tags} == {*found.machine.sources}
    assert found.machine.links[1].gb_per_second == 25


# ---- plan


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--machine", "frontier"], "1 node x 8 ranks"),
        (["--machine", "frontier", "--nodes", "2"], "2 nodes x 8 ranks"),
        (["--machine", "frontier", "--gpus", "32"], "4 nodes x 8 ranks"),
        (["--machine", "frontier", "--nodes", "2", "--ranks", "4"], "2 nodes x 2 ranks"),
        (["--machine", "frontier", "--set", "job.nodes=4", "--set", "job.tasks_per_node=4"], "4 nodes x 4 ranks"),
        (["--set", "job.machine=vista", "--nodes", "2"], "2 nodes x 1 rank"),
        (["--set", "job.machine=vista", "--machine", "polaris"], "1 node x 4 ranks"),
        (["--ranks", "2"], "1 node x 2 ranks"),
        ([], "1 node x 1 rank"),
    ],
)
def test_a_plan_is_for_the_ranks_that_are_asked_for(words: list[str], ranks: str, small: Path, run) -> None:
    code, out, err = run("plan", small, *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"ranks     {ranks}"


def test_a_plan_on_a_machine_tells_whether_it_fits(small: Path, run) -> None:
    out = run("plan", small, "--machine", "frontier")[1]
    assert "of 64 GiB on Frontier's MI250X GCD" in out
    assert "GiB" not in run("plan", small)[1]
    assert any(
        "Frontier" in why for why in json.loads(run("plan", small, "--machine", "frontier", "--json")[1])["reasons"]
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--machine", "frontier", "--gpus", "12"], "--gpus 12 is not a number of whole nodes"),
        (["--nodes", "2"], "--nodes 2 without a machine"),
        (["--machine", "polaris", "--nodes", "561"], "561 nodes are more than there are"),
        (["--set", "job.machine=nowhere"], "no machine is called 'nowhere'"),
    ],
)
def test_a_plan_that_cannot_be_is_wrong_use(words: list[str], what: str, small: Path, run) -> None:
    code, out, err = run("plan", small, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"hpctrain: {what}\n")
