"""``python -m pdproxy.fronts`` is a front: its leader starts it."""

from pdproxy.fronts.front import run_as_program

run_as_program()
