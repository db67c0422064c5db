"""A run that is killed goes on from what the node itself has, and ends with the numbers of one that was not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.jobs import Launch

CONFIG = """
[run]
dir = "run"
[model]
layers = 1
width = 16
heads = 2
sequence = 16
[data]
text = ["corpus"]
[train]
steps = 40
batch = 64
microbatch = 1          # many of them, so that a run can be killed between two steps
[checkpoint]
near = "$NODE_DISK"
near_every = 2
[log]
peak_tflops = 0.1
"""
SEEN = "saved step 6 near, on the nodes' own disks"


@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_from_the_node_s_own_disk(launch: Launch, tmp_path: Path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("Ranks meet and tokens flow. " * 200)
    (tmp_path / "near.toml").write_text(CONFIG)
    command = ["python", "-m", "hpctrain", "train", "near.toml"]
    env = {"NODE_DISK": str(tmp_path / "disk")}

    job = launch.start(2, *command, env=env)
    limit = time.monotonic() + 120
    while SEEN not in job.stdout + job.stderr and time.monotonic() < limit:
        time.sleep(0.01)
    job.stop()
    assert SEEN in job.stdout + job.stderr and not list((tmp_path / "run/checkpoints").glob("step-*"))
    assert list((tmp_path / "disk").glob("hpctrain-*/step-*"))

    done = launch(2, *command, "--set", "train.steps=6", env=env)  # so there is no step to do
    assert done.returncode == 0, done.stderr
    (start,) = re.findall(r"going on from step (\d+)", done.stdout + done.stderr)
    made = f"run/checkpoints/step-{int(start):08}.h5"
    assert int(start) >= 6 and f"saved {made}" in done.stdout + done.stderr and (tmp_path / made).exists()
    assert not list((tmp_path / "disk").iterdir())

    done = launch(2, *command, env=env)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"going on from step (\d+)", done.stdout + done.stderr) == [start]

    assert launch(2, *command, "--set", "run.dir=other", "--set", "checkpoint.near_every=0", env=env).returncode == 0
    same = launch(0, "python", "-m", "hpctrain", "ckpt", "diff", "run/checkpoints", "other/checkpoints")
    assert same.returncode == 0, same.stdout
