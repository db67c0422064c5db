"""What would make a run slow or break it, decided from what the ranks found. Pure: facts in, advice out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hpctrain.cluster.cores import share
from hpctrain.cluster.probe import Probe
from hpctrain.cluster.sysfs import spans

GIB = 2**30
SHARED_FOLDERS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "cephfs",
    "ceph",
    "fuse",
    "wekafs",
    "panfs",
    "9p",
    "virtiofs",
    "daos",
)


@dataclass(frozen=True)
class Advice:
    """A warning: what was seen, why it hurts, and how to mend it."""

    what: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}\n  {self.why}\n  {self.mend}"


@dataclass(frozen=True)
class Rank:
    """A rank, its node, the cores it may use, and what it found."""

    rank: int
    node: int
    cores: frozenset[int]
    probe: Probe


def lost_cores(asked: int | None, cpus: int, started_by_srun: bool) -> list[Advice]:
    """A rank that got one processor of the several that were asked for each task."""
    if not asked or asked == 1 or cpus > 1:
        return []
    what = f"{asked} processors were asked for each task, but this rank may use only one"
    if not started_by_srun:
        mend = f"mpirun --bind-to none, or --map-by slot:PE={asked}"
        return [Advice(what, "mpirun binds each rank to one core unless told otherwise", mend)]
    mend = f"give it to srun too: srun --cpus-per-task={asked}, or export SRUN_CPUS_PER_TASK={asked}"
    return [Advice(what, "srun of Slurm 22.05 to 23.02 does not take --cpus-per-task over from sbatch", mend)]


def lost_tasks(asked: int | None, here: int) -> list[Advice]:
    """Fewer ranks on a node than were asked for."""
    if not asked or asked <= here:
        return []
    return [
        Advice(
            f"SLURM_NTASKS_PER_NODE = {asked}, but {here} of the ranks run on this node",
            "fewer ranks were started than were asked for; the batch size counts those that run",
            f"start with srun --ntasks-per-node={asked}, without --ntasks",
        )
    ]


def all_of(ranks: Sequence[Rank], clocks: Sequence[float]) -> list[Advice]:
    """Everything that is to be said of a job, each thing once, by the first node that shows it."""
    nodes: dict[int, list[Rank]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    seen = (check(node) for check in NODE_CHECKS for node in nodes.values())
    first: dict[str, Advice] = {}
    for found in seen:
        if found:
            first.setdefault(found.mend, found)
    whole = (check(ranks) for check in JOB_CHECKS)
    return [*first.values(), *(found for found in whole if found), *clocks_apart(clocks)]


def few_cores(node: Sequence[Rank]) -> Advice | None:
    """Ranks that outnumber the cores they may use."""
    cores = [rank.cores for rank in node]
    crowded = [rank for rank in node if share(rank.cores, cores) < 1]
    if not crowded:
        return None
    return Advice(
        f"{len(crowded)} ranks on {node[0].probe.host} share {len(frozenset().union(*cores))} cores",
        "each waits for the others to get off its core, and spinning waits cost most",
        "start fewer ranks on a node, or mpirun --bind-to none, or srun --cpus-per-task=N",
    )


def many_threads(node: Sequence[Rank]) -> Advice | None:
    """More threads than cores."""
    given = node[0].probe.threads
    threads = int(given) if given and given.isdigit() else 0
    cores = len(frozenset().union(*(rank.cores for rank in node)))
    if len(node) * threads <= max(cores, len(node)):
        return None
    return Advice(
        f"OMP_NUM_THREADS = {threads} for {len(node)} ranks on {node[0].probe.host}, which may use {cores} cores",
        "threads that share a core wait for each other",
        "unset OMP_NUM_THREADS: each rank then takes its share of the cores",
    )


def small_shm(node: Sequence[Rank]) -> Advice | None:
    """A /dev/shm in which the ranks' windows have no room."""
    total = node[0].probe.shm.total_bytes
    if len(node) == 1 or total >= GIB:
        return None
    return Advice(
        f"/dev/shm on {node[0].probe.host} has {total / 2**20:.0f} MiB",
        "the ranks of a node pass large messages through it",
        "in a container: --shm-size=8g (Docker, Podman), or bind the node's /dev/shm (Apptainer does)",
    )


def isolated_devices(node: Sequence[Rank]) -> Advice | None:
    """Ranks that see one device each of several."""
    seen = {device for rank in node for device in rank.probe.devices}
    if len(node) == 1 or len(seen) == 1 or any(len(rank.probe.devices) != 1 for rank in node):
        return None
    return Advice(
        f"each of {len(node)} ranks on {node[0].probe.host} sees one device only ({node[0].probe.device_mask})",
        "NCCL and MPI reach another rank's device directly only where both see it; else they take slow paths, unsaid",
        "show all devices to all ranks: srun --gpus-per-node=N --gpu-bind=none, without --gpus-per-task",
    )


def far_cores(node: Sequence[Rank]) -> Advice | None:
    """Ranks that the launcher keeps on cores far from the only device that it shows them."""
    far = [rank for rank in node if len(rank.probe.near) == 1 and _far(rank.cores, rank.probe.near[0].cores)]
    if not far:
        return None
    first = far[0]
    return Advice(
        f"rank {first.rank} on {first.probe.host} computes on cores {spans(first.cores)}, and its device is near"
        f" {spans(first.probe.near[0].cores)}",
        f"{len(far)} ranks of that node reach their device and its network interface through another NUMA domain",
        "srun --gpu-bind=closest, or a --cpu-bind list in the order of the devices; the lines devices.near have both",
    )


def _far(cores: Collection[int], near: Collection[int]) -> bool:
    return bool(near) and not set(cores) & set(near)


def hidden_devices(node: Sequence[Rank]) -> Advice | None:
    """A node with accelerators that torch does not see."""
    has = node[0].probe.devices_of_node
    if not has or any(rank.probe.devices for rank in node):
        return None
    return Advice(
        f"{node[0].probe.host} has {has} accelerators in /dev, and torch {node[0].probe.torch} sees none",
        "a torch built for processors only, a driver too old for it, or a mask such as CUDA_VISIBLE_DEVICES hides them",
        "install the torch build for this accelerator; in a container start it with --nv (NVIDIA) or --rocm (AMD)",
    )


def two_mpis(node: Sequence[Rank]) -> Advice | None:
    """A parallel HDF5 that is linked to another MPI than the one the ranks meet through."""
    libraries = node[0].probe.mpi_libraries
    if len(libraries) < 2:
        return None
    return Advice(
        f"two MPI libraries are loaded: {', '.join(libraries)}",
        "h5py was built for another MPI than the one the ranks meet through, and collective writing would crash",
        "build h5py against the same MPI (CC=mpicc HDF5_MPI=ON), or install the serial wheel of h5py",
    )


def little_space(ranks: Sequence[Rank]) -> Advice | None:
    """A run folder that is nearly full."""
    folder = ranks[0].probe.folder
    if folder.free_bytes >= 10 * GIB:
        return None
    return Advice(
        f"{folder.free_bytes / GIB:.1f} GiB are free on {folder.point}, where the run folder is",
        "a checkpoint takes 12 to 16 bytes for each parameter, and the newest are kept beside the one being written",
        "free space there, or set run.dir to another file system",
    )


def private_folder(ranks: Sequence[Rank]) -> Advice | None:
    """A run folder that each node has for itself."""
    folder = ranks[0].probe.folder
    if len({rank.node for rank in ranks}) == 1 or folder.kind.startswith(SHARED_FOLDERS):
        return None
    return Advice(
        f"the run folder is on {folder.kind} ({folder.point}), and the ranks are on several nodes",
        "such a file system belongs to one node, and all ranks write into one checkpoint",
        "set run.dir to a file system that all nodes share",
    )


def slow_folder(ranks: Sequence[Rank]) -> Advice | None:
    """A shared file system that wants to be written to in its own way."""
    folder, nodes = ranks[0].probe.folder, len({rank.node for rank in ranks})
    note = next((note for kind, note in FOLDER_NOTES.items() if folder.kind.startswith(kind)), None)
    if nodes == 1 or note is None:
        return None
    return Advice(f"the run folder is on {folder.kind} ({folder.point}), written from {nodes} nodes", *note)


FOLDER_NOTES = {
    "nfs": (
        "nodes cache NFS apart from each other, and one server takes everything",
        "use a parallel file system where the site has one",
    ),
    "lustre": (
        "a file lies on as many targets as its folder's striping says, often one, and is written no faster",
        "look with lfs getstripe FOLDER, and follow the site's advice on striping large shared files",
    ),
}


def clocks_apart(clocks: Sequence[float]) -> list[Advice]:
    """Nodes whose clocks disagree by more than logs and traces bear."""
    apart = max(clocks) - min(clocks)
    if apart < 1.0:
        return []
    node = max(range(len(clocks)), key=lambda index: abs(clocks[index]))
    return [
        Advice(
            f"clocks are {apart:.1f} s apart; node {node} is {clocks[node]:+.1f} s from the first",
            "times in logs of several nodes cannot be compared, and file times mislead make and caches",
            "ask the site to look at NTP or PTP on that node",
        )
    ]


def strangers(listed: Collection[str], hosts: Sequence[str]) -> list[Advice]:
    """Ranks that run where Slurm's list of nodes does not say."""
    strange = [host for host in hosts if host.split("#")[0].split(".")[0] not in listed]
    if not strange:
        return []
    return [
        Advice(
            f"ranks run on {', '.join(strange[:8])}, which Slurm's list of nodes does not have",
            "the host's own name differs from Slurm's, or the ranks run outside the job",
            "compare hostname with SLURMD_NODENAME; start inside the job, with srun or its mpirun",
        )
    ]


NODE_CHECKS: tuple[Callable[[Sequence[Rank]], Advice | None], ...] = (
    few_cores,
    many_threads,
    small_shm,
    isolated_devices,
    far_cores,
    hidden_devices,
    two_mpis,
)
JOB_CHECKS: tuple[Callable[[Sequence[Rank]], Advice | None], ...] = (little_space, private_folder, slow_folder)
