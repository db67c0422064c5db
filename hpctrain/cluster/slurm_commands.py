"""The queue through Slurm's own commands: ``squeue``, ``sinfo``, ``scontrol``, ``sbatch`` and ``scancel``.

Lists are read as JSON. Where a release has none, or one that is not known, one warning tells its version, and the text
of ``scontrol`` is read instead: slower in large queues, but the same.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hpctrain.cluster import slurm_json, slurm_text
from hpctrain.cluster.advice import Advice
from hpctrain.cluster.queue import Expected, Partition, QueuedJob, QueueNode, Tell, select, warn
from hpctrain.cluster.slurm_json import UnknownSchema
from hpctrain.errors import LaunchError, QueueError

SECONDS = 60.0  # a controller of a large site may take half a minute when it is busy
FORGOTTEN = "Invalid job id"
T = TypeVar("T")

_SUBMITTED = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
# What Slurm says -> how to mend it; the first that is found.
MENDS = {
    "Invalid partition": "sinfo -s lists the partitions; name one with --partition",
    "Invalid account": "sacctmgr show associations user=$USER lists your accounts; name one with --account",
    "Invalid qos": "sacctmgr show associations user=$USER lists your qualities of service; name one with --qos",
    "node configuration is not available": "ask for fewer nodes, or less of each; sinfo -Nl lists them",
    "time limit is invalid": "sinfo -o '%P %l' lists the longest times; ask for less with --time",
    "exceeds": "sacctmgr show qos, and the site's pages, tell the limits; ask for less",
    FORGOTTEN: "squeue --me lists your jobs",
    "Unable to contact slurm controller": "sinfo tells when it answers again; nothing was changed",
    "Socket timed out": "the controller is busy: look with squeue --me whether it was done, then try again",
}
OTHERWISE = "these are Slurm's own words; the site's pages tell what it allows"


class CommandQueue:
    """The queue that Slurm's commands tell of. It has state: which warnings were told, so that each comes once."""

    def __init__(self, tell: Tell = warn, seconds: float = SECONDS) -> None:
        self._tell, self._seconds = tell, seconds
        self._told: set[str] = set()

    def jobs(self, ids: Sequence[str] = (), user: str | None = None) -> tuple[QueuedJob, ...]:
        wholes = dict.fromkeys(id.partition("_")[0] for id in ids)  # arrays: tasks that wait are one to some releases
        narrowed = [f"--jobs={','.join(wholes)}"] if ids else []
        narrowed += [f"--user={user}"] if user else []
        asked = "squeue", "--json", "--states=all", *narrowed
        try:
            found = self._list(asked, slurm_json.jobs, "job", slurm_text.jobs)
        except QueueError as error:
            if FORGOTTEN not in error.why:
                raise
            return tuple(job for id in ids for job in self.jobs([id], user)) if len(ids) > 1 else ()
        return select(found, ids, user)  # releases before 23.02 do not narrow their JSON

    def job(self, id: str) -> QueuedJob | None:
        return next(iter(self.jobs([id])), None)

    def nodes(self) -> tuple[QueueNode, ...]:
        return self._list(("sinfo", "--json", "--Node"), slurm_json.nodes, "node", slurm_text.nodes)

    def partitions(self) -> tuple[Partition, ...]:
        return slurm_text.partitions(self._show("partition"))

    def submit(self, script: str, folder: Path, options: Sequence[str] = ()) -> str:
        said = self._run(["sbatch", "--parsable", *options], text=script, folder=folder)
        found = _SUBMITTED.search(said.stdout)
        if not found:
            why = f"it said {said.stdout.strip()!r}"
            raise QueueError("sbatch gave no job id", why, "look with squeue --me whether the job is there")
        return found[1]

    def expect(self, script: str, folder: Path, options: Sequence[str] = ()) -> Expected:
        command = ["sbatch", "--test-only", *options]
        said = self._run(command, text=script, folder=folder, more={"SLURM_TIME_FORMAT": "standard"})
        return slurm_text.expected(said.stderr + said.stdout)

    def cancel(self, id: str) -> None:
        self._run(["scancel", id])

    def signal(self, id: str, name: str, script: bool = False) -> None:
        self._run(["scancel", f"--signal={name}", *(["--batch"] if script else []), id])

    def requeue(self, id: str) -> None:
        self._run(["scontrol", "requeue", id])

    def _list(self, asked: Sequence[str], parse: Callable[[str], T], kind: str, parse_text: Callable[[str], T]) -> T:
        """A list by its JSON, or by the text of ``scontrol`` where that cannot be had or read."""
        try:
            said = self._run(asked)
        except QueueError as error:
            if not _lacks_json(error.why):
                raise
            self._say(_no_json(asked[0], error.why))
        else:
            try:
                return parse(said.stdout)
            except UnknownSchema as fault:
                self._say(_unknown(asked[0], slurm_json.writer(said.stdout), str(fault)))
        return parse_text(self._show(kind))

    def _show(self, kind: str) -> str:
        return self._run(["scontrol", "--oneliner", "--all", "show", kind], more=slurm_text.TIME_FORMAT).stdout

    def _say(self, advice: Advice) -> None:
        if advice.what not in self._told:
            self._told.add(advice.what)
            self._tell(advice)

    def _run(
        self, command: Sequence[str], text: str = "", folder: Path | None = None, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run(command, text, folder, more or {}, self._seconds)


def run(
    command: Sequence[str], text: str, folder: Path | None, more: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands to its end; QueueError with its words where it fails or does not come to one."""
    try:
        done = subprocess.run(
            command, input=text, cwd=folder, env={**os.environ, **more}, timeout=seconds,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise _missing(command[0], folder) from None
    except subprocess.TimeoutExpired:
        why = "Slurm's controller is busy or cannot be reached"
        look = "look with squeue --me whether it was done all the same, then try again"
        raise QueueError(f"{' '.join(command[:2])} did not answer in {seconds:.0f} s", why, look) from None
    if done.returncode:
        words = _words(done.stderr or done.stdout)
        raise QueueError(f"{' '.join(command)} failed", words, mend(words))
    return done


def release() -> str | None:
    """The release of Slurm that its commands are of, such as ``22.05.8``; None where they do not tell."""
    try:
        said = run(["squeue", "--version"], "", None, {}, SECONDS).stdout
    except (LaunchError, QueueError):
        return None
    found = re.search(r"\d+\.\d+(?:\.\d+)?", said)
    return found[0] if found else None


def _missing(command: str, folder: Path | None) -> LaunchError:
    if folder is not None and not folder.is_dir():
        return LaunchError(f"{folder} is no folder", f"{command} is to run there", "make it first")
    return LaunchError(
        f"{command} is not on PATH",
        "hpctrain asks Slurm by its own commands, and containers and compute nodes may lack them",
        f"call hpctrain where {command} is, or put it on PATH (module load slurm)",
    )


def _words(text: str) -> str:
    """What a command complained of, without its own name before each line."""
    lines = [re.sub(r"^\w+: (?:error: )?", "", line).strip() for line in text.splitlines()]
    return "\n  ".join(line for line in lines if line) or "it said nothing"


def mend(words: str) -> str:
    """How to mend what Slurm complained of."""
    return next((mend for part, mend in MENDS.items() if part.lower() in words.lower()), OTHERWISE)


def _lacks_json(words: str) -> bool:
    """Whether a command failed because it writes no JSON."""
    return "json" in words.lower() or "serializer" in words.lower()


def _no_json(command: str, words: str) -> Advice:
    why = f"this Slurm writes none: {words.splitlines()[0]}"
    return Advice(f"{command} --json cannot be had", why, "the text of scontrol is read instead; nothing is lost")


def _unknown(command: str, version: str, fault: str) -> Advice:
    return Advice(
        f"{command} --json has a schema that hpctrain does not know ({version})",
        fault,
        "the text of scontrol is read instead; nothing is lost",
    )
