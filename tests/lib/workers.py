"""A plugin for pytest-xdist's controller: the order of the files, and what comes of a worker that is lost.

pytest-xdist 3.8 runs the test at which a worker died again, in the next worker, until none is left; and it waits for
ever for a worker that was given a file without a test that is left, or that neither goes on nor ends.
"""

import contextlib
import os
import signal
import threading
import time

import durations
import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:  # tests may be run without it, in one process
    LoadFileScheduling = object

GRACE = 60  # seconds after pytest-timeout's limit, which ends a worker in which Python still runs


class Files(LoadFileScheduling):
    """A file is one worker's. The files that take longest are first, so that no worker waits long for the others."""

    def _assign_work_unit(self, node):
        longest = max(self.workqueue, key=lambda file: (seconds().get(file, 0.0), len(self.workqueue[file])))
        self.workqueue.move_to_end(longest, last=False)
        with contextlib.suppress(OSError):  # it has just died; its files are given to others once that is told
            super()._assign_work_unit(node)

    def _reschedule(self, node):
        if node in self.registered_collections:  # a new worker has to collect the tests first
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)  # a worker begins a test once it knows of the next, or that there is none

    def remove_node(self, node):
        """The test that was running fails; what is left of the worker's files is for the others."""
        units = self.assigned_work.pop(node)
        lost = running(units)
        if lost is not None:
            units[lost.partition("::")[0]][lost] = True
            self.workqueue.update({file: unit for file, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
        return lost


def seconds() -> dict:
    """{file: seconds}, of those in durations.tsv"""
    files: dict = {}
    for test, (_, spent, _) in durations.read().items() if durations.TABLE.is_file() else ():
        file = test.partition("::")[0]
        files[file] = files.get(file, 0.0) + spent
    return files


def running(units: dict):
    """The first test that has not ended, of a worker's."""
    return next((test for unit in list(units.values()) for test, ended in list(unit.items()) if not ended), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    controller = session.config.pluginmanager.getplugin("dsession")
    if controller and session.config.pluginmanager.hasplugin("timeout"):
        limit = float(session.config.getoption("timeout") or session.config.getini("timeout") or 0)
        threading.Thread(target=watch, args=(controller, limit), daemon=True).start()


def watch(controller, limit: float) -> None:
    """Ends a worker that neither ends its test nor dies, within `limit` and GRACE. It may have stopped, hold Python's
    lock, or have left the pipe by which its end shows to a process of its own."""
    since: dict = {}
    while limit:
        time.sleep(1)
        for node in list(controller._active_nodes):
            test = running(getattr(controller.sched, "assigned_work", {}).get(node, {}))
            if since.get(node, ("", 0.0))[0] != test:
                since[node] = test, time.monotonic()
            spent = time.monotonic() - since[node][1]
            if spent > limit + GRACE:
                end(controller, node, test, spent)


def end(controller, node, test, spent: float) -> None:
    print(f"\n{node.gateway.id} has been at {test or 'no test'} for {spent:.0f} s: it is ended", flush=True)
    if "pid" in getattr(node, "workerinfo", {}):  # it has started
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.workerinfo["pid"], signal.SIGKILL)
    time.sleep(2)  # the controller is told, unless another process has the pipe
    if node in controller._active_nodes and not node._down:
        node._down = True
        controller.queue.put(("errordown", dict(node=node, error="lost")))
