"""How the files are shared among pytest's processes, so that a process which crashes costs the run one test.

xdist's own scheduler hands over what was left by a process that crashed, too, but gives it to another process with the
tests that were done and with the one that crashed, and halts where that is fewer tests than it waits for (pytest-xdist
3.8, issues 1323 and 1327). Where processes are not replaced, it ends the run with most of its tests never run.
"""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController


class ByFile(LoadFileScheduling):
    """`ByFile` gives each process a file at a time, in the order of their names."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Takes back what a process leaves undone. Returns the test in which it crashed, which is not run again."""
        files = self.assigned_work.pop(node)
        left = {
            file: undone
            for file, tests in files.items()
            if (undone := {test: False for test, is_done in tests.items() if not is_done})
        }
        if not left:
            return None
        first = next(iter(left.values()))
        crashed = next(iter(first))
        del first[crashed]
        for file, undone in left.items():
            if undone:
                self.workqueue[file] = undone
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Gives a process files until it has something to do behind its next test, for which it waits."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            if not self.workqueue:
                node.shutdown()
                return
            self._assign_work_unit(node)
