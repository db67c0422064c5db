"""A group's worker does things in the order in which they were given."""

from __future__ import annotations

from threading import Event, current_thread

import pytest

from hpctrain.comm.worker import Worker


@pytest.fixture
def worker():
    worker = Worker("test", threads=True)
    yield worker
    worker.close()


def test_work_is_done_by_the_caller_while_nothing_is_under_way(worker):
    threads = []
    worker.do(lambda: threads.append(current_thread()), later=False)
    assert threads == [current_thread()]


def test_work_wanted_later_goes_on_beside_the_caller(worker):
    go, threads = Event(), []
    handle = worker.do(lambda: (go.wait(10), threads.append(current_thread())), later=True)
    assert not handle.done()
    go.set()
    handle.wait()
    assert threads != [current_thread()] and handle.done()


def test_work_wanted_now_waits_for_what_was_asked_before(worker):
    go, order = Event(), []
    worker.do(lambda: (go.wait(10), order.append("first")), later=True)
    go.set()
    worker.do(lambda: order.append("second"), later=False)
    assert order == ["first", "second"]


def test_an_error_comes_to_whoever_waits_and_to_nobody_else(worker):
    failing = worker.do(lambda: 1 / 0, later=True)
    fine = worker.do(lambda: None, later=True)
    fine.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()


def test_without_threads_work_wanted_later_is_done_at_once():
    worker, threads = Worker("test", threads=False), []
    handle = worker.do(lambda: threads.append(current_thread()), later=True)
    assert threads == [current_thread()] and handle.done()
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: 1 / 0, later=True).wait()


def test_work_is_let_go_of_when_it_is_done(worker):
    class Big:
        pass

    import weakref

    big = Big()
    seen = weakref.ref(big)
    handle = worker.do(lambda big=big: None, later=True)
    handle.wait()
    del big
    assert seen() is None
