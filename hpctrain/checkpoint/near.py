"""Near: checkpoints on the nodes' own disks, or in their memory, between two in the run's folder.

Each rank's part is on its node, and on a partner node too, so one node may be lost. On a restart the parts are taken
wherever they are, on any number of ranks, if they are newer than the newest checkpoint in the run's folder.

Parts lie in a folder that only the user may enter, and whose name nobody can guess: it has the run's mark, a random
number in the file ``near`` beside the run's checkpoints. So what another run, or another life of this one, has left on
a node is never taken. Every method but ``due`` and ``close`` is collective.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import keep, near_read
from hpctrain.checkpoint.checksums import Written
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.near_file import Head, placed, read_head
from hpctrain.checkpoint.near_read import Part, Save
from hpctrain.checkpoint.near_write import keepers, writing
from hpctrain.checkpoint.save import parts
from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.checkpoint.state import Entry, State, agree
from hpctrain.checkpoint.streams import Bits, finish
from hpctrain.checkpoint.together import led, together
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, ConfigError, FullError
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.topology import Topology

MARK = "near"
MARKED = re.compile(r"[0-9a-f]{32}\n")
PART_FILE = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.(\d+)\.(own|copy)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where this run's parts are: the folder on this node, the run's mark, and which rank is on which node."""

    folder: Path
    mark: str
    topology: Topology


class Going:
    """A save that goes on while its run trains; live. ``saving`` gives its bits, for a thread of this rank."""

    def __init__(self, step: int, saving: Callable[[ThreadPoolExecutor], Bits[None]]) -> None:
        self.step = step
        self._thread = ThreadPoolExecutor(1, "near")
        self._bits = saving(self._thread)

    def advance(self) -> bool:
        """Do what can be done without waiting; whether that was the last."""
        ended = object()
        if next(self._bits, ended) is not ended:
            return False
        self._thread.shutdown()
        return True

    def land(self) -> bool:
        """Do all that is left; True."""
        finish(self._bits)
        self._thread.shutdown()
        return True

    def close(self) -> None:
        """Give up, and leave nothing."""
        self._bits.close()
        self._thread.shutdown(cancel_futures=True)


class Near:
    """The near checkpoints of one run, whose others are in ``home``. ``group`` is of all ranks of ``mesh``.

    ``host`` names this rank's node; no two nodes have the same name. It keeps the place, once it was made, and which
    saves turned out to be of no use.
    """

    def __init__(self, config: CheckpointConfig, home: Path, mesh: Mesh, group: Group, host: str | None = None) -> None:
        self.config, self.home, self.mesh, self.group = config, Path(home), mesh, group
        self._host = host or socket.gethostname()
        self._place: Place | None = None
        self._useless: set[str] = set()
        self._going: Going | None = None

    def due(self, step: int) -> bool:
        """Whether to save near after ``step`` steps."""
        return self.config.near_every > 0 and step > 0 and step % self.config.near_every == 0

    def save(self, step: int, state: State) -> None:
        """Write ``state`` on the nodes; what they had before goes when every rank has confirmed its bytes.

        On an error all ranks raise it, and what was there before is whole.
        """
        entries = agree(state, self.mesh, self.group)
        slots = placed(entries)
        self._begin(step, slots, parts(entries, state, slots))
        self.wait()

    def save_if_room(self, step: int, state: State) -> bool:
        """As ``save``; where a disk is full False, with a line in the log, if the run is to go on without."""
        return self.if_room(step, lambda: self.save(step, state))

    def if_room(self, step: int, act: Callable[[], Any]) -> bool:
        """Do what saves ``step``; False as in ``save_if_room``."""
        try:
            act()
        except FullError as error:
            if self.config.on_full == "stop":
                raise
            if self.group.leads:
                log.warning("step %d was not saved near: %s", step, keep.in_a_line(error))
            return False
        return True

    # ---- in the background -------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """The step of a save that has not come to its end, 0 with none. The same on all ranks."""
        return self._going.step if self._going else 0

    def begin(self, step: int, copy: Snapshot) -> None:
        """Begin to save a copy, which may not change before the save has ended; ``advance`` brings it on."""
        slots = placed(copy.entries)
        self._begin(step, slots, copy.written(slots))

    def advance(self) -> int:
        """Bring the save under way on, without waiting for any disk; its step once it has ended, else 0.

        Each call sends at most 64 MiB from each rank. An error of any rank is raised on all, and nothing is left.
        """
        return self._ended(lambda going: going.advance())

    def wait(self) -> int:
        """Wait for the save under way, where there is one, and give its step; errors as in ``advance``."""
        return self._ended(lambda going: going.land())

    def close(self) -> None:
        """Give up a save that is under way. Each rank calls it by itself; again is no harm."""
        going, self._going = self._going, None
        if going:
            going.close()

    def _begin(self, step: int, slots: tuple[Slot, ...], written: Sequence[Written]) -> None:
        self.wait()
        self._going = Going(step, lambda thread: self._saving(step, slots, written, thread))

    def _ended(self, act: Callable[[Going], bool]) -> int:
        """The step of the save under way if ``act`` ends it."""
        going = self._going
        try:
            if going is None or not act(going):
                return 0
        except BaseException:
            self.close()
            raise
        self._going = None
        return going.step

    def _saving(
        self, step: int, slots: tuple[Slot, ...], written: Sequence[Written], thread: ThreadPoolExecutor
    ) -> Bits[None]:
        where = self._open()
        told = led(self.group, lambda: [secrets.token_hex(4), self._newest(step)], f"looking into {self.home}")
        self._on_each_node(lambda: _sweep(where.folder), f"clearing {where.folder}")
        pieces = [piece for _, some in written for piece in some]
        runs = tuple((piece.at, piece.memory.numel()) for piece in pieces)
        head = Head(where.mark, told[0], step, told[1], self.group.rank, self.group.size, slots, runs)
        writers = keepers(where.topology, self.config.near_copies)
        yield from writing(head, pieces, where.folder, writers, self.group, thread)
        self._on_each_node(lambda: _prune(where.folder, head.save), f"clearing {where.folder}")

    def resume(self, entries: tuple[Entry, ...], state: State, newer_than: int) -> int:
        """Fill ``state`` from the newest save that is whole and newer than a step; its step, and 0 where there is none.

        A part that is damaged is taken from the partner; a save that lacks a part everywhere is passed over. Each
        gets a line in the log.
        """
        if self.config.near is None:
            return 0
        where = self._open()
        newest = led(self.group, self._newest, f"looking into {self.home}")
        for save in near_read.saves(self._parts(where)):
            if save.save in self._useless or save.step <= newer_than or not self._counts(save, newest):
                continue
            if self._take(save, where, entries, state):
                return save.step
            self._useless.add(save.save)
        return 0

    def clear(self) -> None:
        """Remove what this run has on the nodes: its last checkpoint is in its own folder."""
        if self.config.near is not None:
            folder = self._open().folder
            self._on_each_node(lambda: shutil.rmtree(folder, ignore_errors=True), f"clearing {folder}")
            self._place = None

    # ---- going on ----------------------------------------------------------------------------------------------------

    def _take(self, save: Save, where: Place, entries: tuple[Entry, ...], state: State) -> bool:
        """Fill ``state``, unless a part is nowhere, or a disk fails."""
        chosen = self._chosen(save, where, entries)
        if chosen is None:
            return False
        try:
            near_read.fill(chosen, where.folder, where.topology, entries, state, self.group)
        except CheckpointError as error:
            self._say("the near checkpoint of step %d was skipped: %s", save.step, keep.in_a_line(error))
            return False
        copies = [part.rank for part in chosen if not part.own]
        beside = f"; the parts of ranks {copies} from their partners' nodes" if copies else ""
        self._say("took step %d from the nodes' own disks%s", save.step, beside)
        return True

    def _chosen(self, save: Save, where: Place, entries: tuple[Entry, ...]) -> list[Part] | None:
        """A part of each rank, all of them checked."""
        wrong: set[Part] = set()
        right: set[Part] = set()
        while not (lacking := save.lacking(wrong)):
            chosen = save.chosen(wrong)
            unseen = [part for part in chosen if part not in right]
            if not unseen:
                return chosen
            knobs = (entries, self.group, self.config.verify)
            faults = near_read.check(unseen, where.folder, where.topology, *knobs)
            for _, fault in faults:
                self._say("skipped: %s", fault)
            wrong |= {part for part, _ in faults}
            right |= set(unseen) - wrong
        line = "the near checkpoint of step %d was skipped: the parts of ranks %s are whole on no node"
        self._say(line, save.step, lacking)
        return None

    def _counts(self, save: Save, newest: int) -> bool:
        """Whether the checkpoint that it came after, or a later one, is still in the run's folder."""
        after = save.parts[0].after
        if newest < after:
            line = "the near checkpoint of step %d was skipped: it came after that of step %d, which is no longer in %s"
            self._say(line, save.step, after, self.home)
        return newest >= after

    def _parts(self, where: Place) -> list[Part]:
        """What all nodes have; one rank of each looks."""
        node = where.topology.node_of(self.group.rank)
        own = self._on_each_node(lambda: [asdict(part) for part in _look(where, node)], f"looking at {where.folder}")
        return [Part(**part) for told in self.group.collect(own or []) for part in told]

    # ---- the place ---------------------------------------------------------------------------------------------------

    def _open(self) -> Place:
        """The place of this run's parts, made when it is first asked for."""
        if self._place is None:
            hosts = self.group.collect(self._host)
            mark = led(self.group, self._mark, f"reading {self.home / MARK}")
            folder = together(self.group, lambda: self._folder(mark), f"making a folder in {self.config.near}")
            self._place = Place(folder, mark, Topology(tuple(hosts)))
            if len(self._place.topology.nodes) == 1 and self.config.near_copies > 1:
                self._say("checkpoint.near_copies = %d, and all ranks are on one node: no other has a copy", 2)
        return self._place

    def _mark(self) -> str:
        """The run's mark; a new one where the run has none yet."""
        path = self.home / MARK
        if not path.exists() or not MARKED.fullmatch(path.read_text(encoding="utf-8", errors="replace")):
            self.home.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(keep.part_name(keep.POINTER))  # which is swept when its writer is dead
            aside.write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
            os.replace(aside, path)
        return path.read_text(encoding="utf-8").strip()

    def _folder(self, mark: str) -> Path:
        """This node's folder of the run's parts, which no other user may enter or have made."""
        given = self.config.near or ""
        above = os.path.expandvars(given.replace("{host}", self._host))
        if not given or "$" in above:
            raise ConfigError(
                f"checkpoint.near = {given!r} names no folder",
                f"a variable in it is not set on {self._host}" if given else "near checkpoints need one on each node",
                "give a folder on the node's own disk or in its memory, such as /dev/shm",
            )
        folder = Path(above) / f"hpctrain-{mark}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            _check_ours(folder)
        return folder

    def _newest(self, most: int | None = None) -> int:
        """The newest step, of at most ``most``, that the run's folder has a file of; 0 with none."""
        found = (keep.STEP_FILE.fullmatch(name) for name in keep.listing(self.home))
        steps = (int(one[1]) for one in found if one)
        return max((step for step in steps if most is None or step <= most), default=0)

    def _on_each_node(self, act: Any, doing: str) -> Any:
        """Do ``act`` on the first rank of each node, and give its value there; None on the others."""
        topology = self._open().topology
        first = topology.local_rank(self.group.rank) == 0
        return together(self.group, lambda: act() if first else None, doing)

    def _say(self, line: str, *values: Any) -> None:
        if self.group.leads:
            log.warning(line, *values)


def _look(where: Place, node: int) -> Iterator[Part]:
    """The parts of this run that a node has. What cannot be read gets a line in the log: its copy may be whole."""
    for name in sorted(keep.listing(where.folder)):
        if not PART_FILE.fullmatch(name):
            continue
        try:
            head, _ = read_head(where.folder / name)
        except (CheckpointError, OSError) as error:
            log.warning("skipped: %s", keep.in_a_line(error))
            continue
        if head.run == where.mark:
            yield Part(node, name, head.save, head.step, head.after, head.rank, head.ranks)


def _check_ours(folder: Path) -> None:
    """Refuse a folder that is a link, or that somebody else has made; close one of ours to others."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CheckpointError(
            f"{folder} is not ours",
            f"it belongs to user {found.st_uid}, or is no folder",
            "remove it, or give another folder (checkpoint.near)",
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _sweep(folder: Path) -> None:
    """Remove what ranks that died in a save have left aside; no save goes on now."""
    _remove(folder, [name for name in keep.listing(folder) if name.endswith(".aside")])


def _prune(folder: Path, save: str) -> None:
    """Remove the parts of all saves but one."""
    found = ((name, PART_FILE.fullmatch(name)) for name in keep.listing(folder))
    _remove(folder, [name for name, part in found if part and part[2] != save])


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
