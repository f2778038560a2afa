"""The module decides whether a program that died is started again, and how long after."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """RestartPolicy allows up to `limit` restarts in a row; each wait is twice the one before, and `longest_wait_s` at
    most.

    A program that has run for `steady_s` has recovered: what happens to it then begins a new row.
    """

    limit: int = 0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    steady_s: float = 60.0

    def wait_s(self, num_restarts: int) -> float | None:
        """Returns the seconds to wait before the next restart, after `num_restarts` in a row; None: there is no next
        one."""
        if num_restarts >= self.limit:
            return None
        return min(self.first_wait_s * 2.0**num_restarts, self.longest_wait_s)


NEVER = RestartPolicy()
ON_FAILURE_LIMIT = 5


class Restarts:
    """Restarts counts the restarts of one program.

    Mutable state: `num_in_a_row`.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.num_in_a_row = 0
        self._policy = policy

    def __repr__(self) -> str:
        return f"<Restarts {self.num_in_a_row} of {self._policy.limit}>"

    def next_wait_s(self, status: int, lived_s: float) -> float | None:
        """Returns the seconds to wait after a program has ended with `status`, `lived_s` after it was started; None: it
        stays down.

        Status 0 is no failure: somebody ended the program on purpose.
        """
        if status == 0:
            return None
        if lived_s >= self._policy.steady_s:
            self.num_in_a_row = 0
        wait_s = self._policy.wait_s(self.num_in_a_row)
        if wait_s is not None:
            self.num_in_a_row += 1
        return wait_s
