"""Starting programs of which now and then one hangs before it serves: that one is started again.

An engine that is ready stays frozen until the others are, which is what keeps most of them from hanging. As it starts,
vLLM's worker on a CPU has the kernel move its memory, for which every core has to empty its lists of pages; and a core
on which threads of NIXL spin may not get to it for minutes (the kernel's log: "workqueue lockup", and
"lru_add_drain_per_cpu" among what is pending).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tests.vllm.program import Program

TRIES = 3
IDLE_S = 60.0
"""Who takes less processor time than `BUSY_S` in as long as this hangs. On a machine with other work a start may take
minutes, but takes part in what is done."""
BUSY_S = 1.0
LIMIT_S = 300.0
"""For one start. Five engines at once take about 60 s on two cores that do nothing else."""
POLL_S = 1.0


class Start:
    """Of one program, until it is ready.

    Mutable state: the tries so far, when the last one began, and when it was last seen to have done something, with
    the processor time that it had taken by then.
    """

    def __init__(self, program: Program, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.program = program
        self.say = say
        self.clock = clock
        self.num_tries = 0
        self._begin()

    def _begin(self) -> None:
        self.num_tries += 1
        self.began = self.busy_at = self.clock()
        self.cpu_s = self.program.cpu_s()

    def step(self) -> bool:
        """Whether it is ready now, and frozen. Starts it again when it will never be, or raises `RuntimeError`."""
        if self.program.answers():
            self.program.is_ready = True
            self.program.freeze()
            return True
        if problem := self._problem():
            self._again(problem)
        return False

    def _problem(self) -> str | None:
        if not self.program.is_running:
            return f"ended as it started, with status {self.program.status}"
        now, cpu_s = self.clock(), self.program.cpu_s()
        if abs(cpu_s - self.cpu_s) >= BUSY_S:
            self.busy_at, self.cpu_s = now, cpu_s
        if now - self.busy_at > IDLE_S:
            return f"did nothing for {IDLE_S:g} s as it started (its processes: {self.program.whereabouts()})"
        if now - self.began > LIMIT_S:
            return f"was not ready within {LIMIT_S:g} s (its processes: {self.program.whereabouts()})"
        return None

    def _again(self, problem: str) -> None:
        self.program.kill()
        what = f"{self.program.name} {problem}"
        if self.num_tries == TRIES:
            raise RuntimeError(f"{what}, and was started {TRIES} times\n{self.program.tail(TRIES)}")
        self.say(f"{what}; it is started again, and {self.program.logs[-1]} kept")
        self.program.start()
        self._begin()


def bring_up(
    programs: Iterable[Program],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
) -> None:
    """Returns when all of them, which were started before, are ready and thawed. Raises `RuntimeError`, with the logs,
    when the last try of one fails."""
    programs, started = list(programs), clock()
    for program in programs:
        if program.is_ready:
            program.freeze()
    waiting = [Start(program, say, clock) for program in programs if not program.is_ready]
    after = {}
    while waiting:
        for start in list(waiting):
            if start.step():
                after[start.program.name] = clock() - started
                waiting.remove(start)
        time.sleep(poll_s if waiting else 0)
    if after:
        say("ready: " + ", ".join(f"{name} after {taken_s:.0f} s" for name, taken_s in after.items()))
    for program in programs:
        program.thaw()
