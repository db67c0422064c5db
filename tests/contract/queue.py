"""What every way to a cluster's queue promises: subclass ``QueueContract``, give it a ``queue`` and ``folder``, run it.

    class TestCommands(QueueContract):
        @pytest.fixture
        def queue(self, lab):
            return CommandQueue()

It is run on a real cluster of four nodes of 16 processors, idle at first. ``folder`` is one that all nodes see.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.queue import Queue, QueuedJob
from hpctrain.errors import QueueError

PATIENCE_SECONDS = 60.0
SLEEP = "#!/bin/bash\nsrun sleep 1000\n"
# Tasks and script write down which signal they got. The script waits in the background, so that its trap runs at once.
LISTEN = """#!/bin/bash
trap 'echo script got it >> heard' USR1
srun bash -c 'trap "echo task got it >> heard; exit" USR1; echo ready >> heard; while :; do sleep 0.1; done' &
while :; do wait; sleep 0.1; done
"""


class QueueContract:
    """Promises of a Queue, one a test."""

    def until(self, queue: Queue, id: str, holds: Callable[[QueuedJob], bool]) -> QueuedJob:
        """The job as soon as this holds of it."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while not holds(job := queue.job(id)):
            assert time.monotonic() < limit, f"after {PATIENCE_SECONDS} s: {job}"
            time.sleep(0.1)
        return job

    def heard(self, folder: Path, words: str) -> str:
        """What the script and the tasks wrote, as soon as these words are in it."""
        path, limit = folder / "heard", time.monotonic() + PATIENCE_SECONDS
        while not path.exists() or words not in path.read_text():
            assert time.monotonic() < limit, f"{words!r} was not heard"
            time.sleep(0.1)
        return path.read_text()

    def test_a_job_that_was_handed_in_is_told_as_it_was_asked_for(self, queue: Queue, folder: Path) -> None:
        options = ["-N2", "--ntasks-per-node=3", "--time=10", "--job-name=my job", "--comment=a word"]
        before = int(time.time()) - 1
        id = queue.submit(SLEEP, folder, options)
        job = self.until(queue, id, lambda job: job.state == "RUNNING")
        assert (job.id, job.label, job.name, job.user) == (id, id, "my job", getpass.getuser())
        assert (len(job.nodes), job.node_count, job.tasks, job.partition) == (2, 2, 6, "debug")
        assert (job.folder, job.comment, job.limit_seconds) == (str(folder), "a word", 600)
        assert before <= job.submitted_at <= job.started_at <= time.time() + 1
        assert job.ends_at == job.started_at + 600
        assert (job.restarts, job.array_job, job.het_job, job.over, job.waits) == (0, None, None, False, False)

    def test_options_win_over_those_in_the_script(self, queue: Queue, folder: Path) -> None:
        script = SLEEP.replace("\n", "\n#SBATCH --nodes=2\n#SBATCH --job-name=inside\n", 1)
        job = queue.job(queue.submit(script, folder, ["--nodes=1", "--hold"]))
        assert (job.name, job.node_count, job.state, job.waits) == ("inside", 1, "PENDING", True)

    def test_the_end_of_a_job_is_told_with_its_exit_code(self, queue: Queue, folder: Path) -> None:
        id = queue.submit("#!/bin/bash\nexit 3\n", folder)
        job = self.until(queue, id, lambda job: job.over)
        assert (job.state, job.exit_code, job.exit_signal) == ("FAILED", 3, 0)
        assert job.started_at <= job.ends_at <= time.time() + 1

    def test_a_job_waits_for_another_and_says_so(self, queue: Queue, folder: Path) -> None:
        first = queue.submit(SLEEP, folder)
        second = queue.submit(SLEEP, folder, [f"--dependency=afterany:{first}"])
        job = self.until(queue, second, lambda job: job.reason == "Dependency")
        assert job.waits and first in job.dependency and job.nodes == ()
        queue.cancel(first)
        self.until(queue, second, lambda job: job.state == "RUNNING")

    def test_an_array_is_found_by_its_id_and_each_of_its_jobs_too(self, queue: Queue, folder: Path) -> None:
        array = queue.submit(SLEEP, folder, ["--array=1-4%2"])
        self.until(queue, f"{array}_2", lambda job: job is not None and job.state == "RUNNING")
        assert sorted(job.label for job in queue.jobs([array])) == [f"{array}_1", f"{array}_2", f"{array}_[3-4%2]"]
        assert [job.array_tasks for job in queue.jobs([f"{array}_1"])] == ["1"]
        assert queue.job(f"{array}_4").waits and queue.job(f"{array}_5") is None
        queue.cancel(f"{array}_1")
        self.until(queue, f"{array}_1", lambda job: job.over)
        self.until(queue, f"{array}_3", lambda job: job is not None and job.state == "RUNNING")
        queue.cancel(f"{array}_[4]")  # as a label has it
        assert self.until(queue, f"{array}_4", lambda job: job.over).state == "CANCELLED"
        queue.cancel(array)
        self.until(queue, f"{array}_2", lambda job: job.over)
        assert all(job.over or job.state == "COMPLETING" for job in queue.jobs([array]))

    def test_a_heterogeneous_job_is_its_components(self, queue: Queue, folder: Path) -> None:
        first = queue.submit(SLEEP, folder, ["-N1", ":", "-N2"])
        self.until(queue, first, lambda job: job.state == "RUNNING")
        jobs = queue.jobs([first])
        assert [job.id for job in jobs] == [first, str(int(first) + 1)]
        assert [(job.node_count, job.het_job) for job in jobs] == [(1, first), (2, first)]
        queue.cancel(first)
        self.until(queue, jobs[1].id, lambda job: job.over)

    def test_jobs_are_told_of_one_user_or_of_these_ids(self, queue: Queue, folder: Path) -> None:
        ids = [queue.submit(SLEEP, folder, ["--hold"]) for _ in range(3)]
        assert [job.id for job in queue.jobs(ids[:2])] == ids[:2]
        assert set(ids) <= {job.id for job in queue.jobs(user=getpass.getuser())}
        assert queue.jobs(ids, user="nobody") == ()
        assert set(ids) <= {job.id for job in queue.jobs()}

    def test_a_job_that_slurm_does_not_know_is_none(self, queue: Queue, folder: Path) -> None:
        id = queue.submit(SLEEP, folder, ["--hold"])
        assert queue.job("3999999") is None
        assert [job.id for job in queue.jobs(["3999999", id])] == [id]

    def test_a_forecast_says_when_and_where_and_hands_nothing_in(self, queue: Queue, folder: Path) -> None:
        before = {job.id for job in queue.jobs()}
        found = queue.expect(SLEEP, folder, ["-N2"])
        assert len(found.nodes) == 2 and found.partition == "debug" and "to start at" in found.said
        assert abs(found.starts_at - time.time()) < 3600
        assert {job.id for job in queue.jobs()} == before

    @pytest.mark.parametrize(
        ("option", "words", "mend"),
        [
            ("--mincpus=400", "node configuration is not available", "sinfo -Nl"),
            ("--partition=nowhere", "nvalid partition", "sinfo -s"),
        ],
    )
    def test_a_refusal_comes_with_slurms_words_and_how_to_mend_it(
        self, queue: Queue, folder: Path, option: str, words: str, mend: str
    ) -> None:
        for call in (queue.expect, queue.submit):
            with pytest.raises(QueueError) as caught:
                call(SLEEP, folder, [option])
            assert words in caught.value.why and mend in caught.value.mend

    def test_what_is_done_to_an_unknown_job_is_refused(self, queue: Queue) -> None:
        for call in (lambda: queue.signal("3999999", "USR1"), lambda: queue.requeue("3999999")):
            with pytest.raises(QueueError) as caught:
                call()
            assert "Invalid job id" in caught.value.why

    def test_a_job_that_is_cancelled_ends_whether_it_runs_or_waits(self, queue: Queue, folder: Path) -> None:
        running, waiting = queue.submit(SLEEP, folder), queue.submit(SLEEP, folder, ["--hold"])
        self.until(queue, running, lambda job: job.state == "RUNNING")
        for id in (running, waiting):
            queue.cancel(id)
        assert {self.until(queue, id, lambda job: job.over).state for id in (running, waiting)} == {"CANCELLED"}

    def test_a_signal_comes_to_the_tasks_alone(self, queue: Queue, folder: Path) -> None:
        id = queue.submit(LISTEN, folder)
        self.heard(folder, "ready")
        queue.signal(id, "USR1")
        assert "script got it" not in self.heard(folder, "task got it")

    def test_a_signal_comes_to_the_script_alone(self, queue: Queue, folder: Path) -> None:
        id = queue.submit(LISTEN, folder)
        self.heard(folder, "ready")
        queue.signal(id, "USR1", script=True)
        assert "task got it" not in self.heard(folder, "script got it")

    def test_a_job_that_is_requeued_starts_again_under_its_id(self, queue: Queue, folder: Path) -> None:
        id = queue.submit(SLEEP, folder)
        self.until(queue, id, lambda job: job.state == "RUNNING")
        queue.requeue(id)
        again = self.until(queue, id, lambda job: job.restarts == 1 and job.state == "RUNNING")
        assert again.id == id and not again.over

    def test_nodes_and_partitions_are_those_of_the_cluster(self, queue: Queue) -> None:
        nodes = queue.nodes()
        debug, urgent = sorted(queue.partitions(), key=lambda partition: partition.name)
        assert [node.name for node in nodes] == ["node1", "node2", "node3", "node4"]
        told = {(node.cpus, tuple(sorted(node.partitions)), node.gres) for node in nodes}
        assert told == {(16, ("debug", "urgent"), "gpu:4")}
        assert (debug.name, debug.is_default, debug.up) == ("debug", True, True)
        assert (urgent.name, urgent.is_default, urgent.up) == ("urgent", False, True)
        assert debug.nodes == urgent.nodes == ("node1", "node2", "node3", "node4")
        assert (debug.max_nodes, debug.max_seconds) == (None, None)
