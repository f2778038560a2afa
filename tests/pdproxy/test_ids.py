"""Ids: as many as are wanted, all different, in forked processes too."""

from __future__ import annotations

import re
import subprocess
import sys

from pdproxy.ids import fresh_id


def test_ids_are_32_hex_digits_and_all_different() -> None:
    ids = [fresh_id() for _ in range(1000)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)
    assert len(set(ids)) == 1000


def test_every_bit_is_random() -> None:
    """Each is set in some id and clear in another: of 1000, a bit that is random fails this once in 10^300 times."""
    ids = [int(fresh_id(), 16) for _ in range(1000)]
    everywhere = anywhere = ids[0]
    for one in ids:
        everywhere &= one
        anywhere |= one
    assert (everywhere, anywhere) == (0, (1 << 128) - 1)


def test_a_forked_process_has_ids_of_its_own() -> None:
    code = """
import os
from pdproxy.ids import fresh_id
fresh_id()
child = os.fork()
if child:
    os.waitpid(child, 0)
print(fresh_id())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    ids = result.stdout.split()
    assert len(ids) == 2
    assert ids[0] != ids[1]
