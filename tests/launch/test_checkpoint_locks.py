"""A file system whose lock service fails, as NFS and Lustre often are: nothing of ours asks it for a lock."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import Launch

PROGRAM = Path(__file__).with_name("checkpoint_unlocked.py")
# Takes the place of the C library's calls: every lock on a file in the folder NO_LOCKS_IN is refused with ENOLCK.
REFUSE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int refused(int opened) {
    char link[64], name[4096];
    const char *folder = getenv("NO_LOCKS_IN");
    snprintf(link, sizeof link, "/proc/self/fd/%d", opened);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (!folder || length < 0) return 0;
    name[length] = 0;
    errno = ENOLCK;
    return !strncmp(name, folder, strlen(folder));
}

int flock(int opened, int what) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    return refused(opened) ? -1 : real(opened, what);
}

static int control(const char *name, int opened, int what, void *argument) {
    int (*real)(int, int, void *) = dlsym(RTLD_NEXT, name);
    int locks = what == F_SETLK || what == F_SETLKW || what == F_OFD_SETLK || what == F_OFD_SETLKW;
    return locks && refused(opened) ? -1 : real(opened, what, argument);
}

#define ARGUMENT(what) va_list rest; va_start(rest, what); void *argument = va_arg(rest, void *); va_end(rest)
int fcntl(int opened, int what, ...) { ARGUMENT(what); return control("fcntl", opened, what, argument); }
int fcntl64(int opened, int what, ...) { ARGUMENT(what); return control("fcntl64", opened, what, argument); }
"""


@pytest.mark.timeout(300)
def test_where_no_lock_is_to_be_had_checkpoints_are_saved_and_read_by_either_writer(launch: Launch, tmp_path: Path):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler, to make a C library that refuses locks")
    library, folder = tmp_path / "refuse.so", tmp_path / "checkpoints"
    (tmp_path / "refuse.c").write_text(REFUSE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "refuse.c", "-ldl"], check=True)
    folder.mkdir()
    env = {"LD_PRELOAD": str(library), "NO_LOCKS_IN": str(folder)}
    done = launch(2, "python", PROGRAM, folder, env=env)
    assert done.returncode == 0, done.stderr
    assert "with a lock: " in done.stdout and "No locks available" in done.stdout  # so locks were refused there
