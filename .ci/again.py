"""Runs the tests that have just failed three times more, alone. Passes where each of them passes every time.

The whole suite runs in more processes than there are cores, which other work may share: a test of processes and
deadlines can fail there for want of time. One that fails is named in the log all the same, and a change that breaks
something does not pass three times. More than `MAX_TESTS` failures are never for want of time.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_TESTS = 4
ROUNDS = 3


def main() -> int:
    file = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(file.read_text())) if file.is_file() else []
    if not 0 < len(failed) <= MAX_TESTS:
        print(f"{len(failed)} tests have failed: not run again", flush=True)
        return 1
    for number in range(1, ROUNDS + 1):
        print(f"again, alone, {number} of {ROUNDS}:", *failed, sep="\n  ", flush=True)
        words = ["./scripts/test", "-n", "0", "-p", "no:cacheprovider", *failed]
        if status := subprocess.run(words, cwd=ROOT, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
