"""Mutation runs over a package of one file, with tests that look closely and tests that do not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # dozens of processes, which on a busy machine take seconds each to start

ROOT = Path(__file__).resolve().parents[2]
DEV = ROOT / "scripts" / "dev"

SOURCE = '''\
"""A shop."""

MOST = 10


def price(number: int, is_member: bool) -> int:
    """Of so many things."""
    total = min(number, MOST) * 3
    if is_member and number > 2:
        total -= 2
    return total


def find(number: int) -> int:
    while number > 3:
        number -= 1
    return number


def never() -> int:
    return 1
'''
GOOD = """\
from shop import find, price


def test_price():
    assert [price(n, False) for n in (0, 1, 9, 10, 11, 12)] == [0, 3, 27, 30, 30, 30]
    assert [price(n, True) for n in (1, 2, 3, 4)] == [3, 6, 7, 10]


def test_find():
    assert [find(n) for n in (2, 3, 4, 9)] == [2, 3, 3, 3]
"""
BAD = """\
from shop import find, price


def test_price():
    price(3, True)


def test_find():
    assert find(3)
"""


@pytest.fixture(scope="module")
def changes() -> Iterator[Any]:
    sys.path.insert(0, str(DEV))
    try:
        yield importlib.import_module("mutation.changes")
    finally:
        sys.path.remove(str(DEV))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "shop.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_shop.py").write_text(GOOD)
    return tmp_path


def run(shop: Path, *options: str, tests: str = "tests", status: int = 0) -> str:
    """The shop's tests need no plugin, and to load all that are installed takes most of the time that pytest does."""
    command = [sys.executable, "-m", "mutation", "--root", str(shop), *options, "--tests", tests]
    environment = {**os.environ, "PYTHONPATH": str(DEV), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, env=environment, cwd=shop, capture_output=True, text=True, timeout=570)
    assert result.returncode == status, result.stderr
    return result.stdout + result.stderr


def outcomes(file: Path) -> dict[str, str]:
    """By what the line was changed to."""
    mutants = json.loads(file.read_text())["mutants"]
    return {f"{mutant['line']}: {mutant['after']}": mutant["outcome"] for mutant in mutants}


# ── what is changed ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", {"a <= b"}),
        ("a is not b", {"a is b"}),
        ("a not in b", {"a in b"}),
        ("a <= b != c", {"a < b != c", "a <= b == c"}),
        ("x = a and b or c", {"x = a or b or c", "x = a and b and c"}),
        ("x = not a", {"x = (a)"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x: int = 3", {"x: int = 4", "x: int = 2"}),
        ("x = True", {"x = False"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("f(a)", {"pass"}),
        ("x.y = a", {"pass"}),
        ("x = 'é' < a", {"x = 'é' <= a"}),
        ("if a: f()", {"if (not (a)): f()", "if a: pass"}),
        ("async def f():\n    await asyncio.sleep(a)", {"async def f():\n    pass"}),
        ("def f(a=1):\n    'It.'\n    return a", {"def f(a=2):", "def f(a=0):", "    return None"}),
        ("for x in y:\n    break", {"for x in y:\n    continue"}),
        ("@f(1)\nclass A:\n    __slots__ = (1,)", set()),
        ("def f(x: Literal[1]) -> Literal[2]: ...", set()),
        ("if TYPE_CHECKING:\n    f()", set()),
        ("x = f'{a < b}'", set()),
    ],
)
def test_changes(changes: Any, before: str, after: set[str]) -> None:
    source = before.encode()
    found = {change.apply(source).decode() for change in changes.find_changes("a.py", source) if change.kind}
    if not before.startswith(("a", "def f(a")):
        assert found == after
    for text in after:
        assert any(text in one for one in found)


def test_lines_keep_their_numbers(changes: Any) -> None:
    source = b"f(\n    1,\n    2,\n)  # why\ng()\nif (\n    a\n    and b\n):\n    pass\n"
    found = changes.find_changes("a.py", source)
    assert {change.apply(source).count(b"\n") for change in found} == {source.count(b"\n")}
    [removed] = [change for change in found if change.line == 1 and change.kind == "statement removed"]
    assert removed.apply(source).startswith(b"pass\n\n\n  # why\ng()\n")
    assert list(removed.statement) == [1, 2, 3, 4]


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_good_tests_notice_whatever_they_go_through(shop: Path, tmp_path: Path) -> None:
    said = run(shop, "shop.py", "--seed", "1", "--jobs", "2", "--limit", "3", "--json", str(tmp_path / "out.json"))
    told = outcomes(tmp_path / "out.json")
    unnoticed = {change for change, outcome in told.items() if outcome == "survived"}
    assert unnoticed == set(), said
    assert {change for change, outcome in told.items() if outcome == "unreached"} == {
        "21: return None",
        "21: return 2",
        "21: return 0",
    }
    assert told["16: number -= 0"] == "hung"
    assert "shop.py:21: -return 1 +return 2  (no test goes through it)" in said
    assert f"noticed {len(told) - 3} of {len(told)}" in said
    assert (shop / "shop.py").read_text() == SOURCE


def test_bad_tests_do_not(shop: Path, tmp_path: Path) -> None:
    (shop / "tests" / "test_shop.py").write_text(BAD)
    """None of the changes that this seed chooses is one that hangs, which would take all of the limit."""
    said = run(shop, "shop.py", "--seed", "8", "--sample", "8", "--limit", "20", "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    survivors = [mutant for mutant in report["mutants"] if mutant["outcome"] == "survived"]
    assert len(survivors) >= 3
    for mutant in survivors:
        assert f"shop.py:{mutant['line']}: -{mutant['before']} +{mutant['after']}\n" in said
    assert f"noticed {report['noticed']} of 8" in said


def test_the_same_seed_makes_the_same_choice_and_the_tests_are_traced_once(shop: Path) -> None:
    first, second = (run(shop, "shop.py", "--seed", "7", "--sample", "1", "--limit", "20") for _ in range(2))
    assert first.splitlines()[0] == second.splitlines()[0]
    assert first.splitlines()[0].startswith("seed 7: 1 of ")
    assert "looking which tests" in first
    assert "looking which tests" not in second


def test_a_test_that_fails_by_itself_notices_nothing(shop: Path, tmp_path: Path) -> None:
    (shop / "tests" / "test_shop.py").write_text(
        "from shop import price\n\n\ndef test_it():\n    assert price(1, True) == 0\n"
    )
    said = run(shop, "shop.py", "--seed", "1", "--sample", "2", "--json")
    report, _ = json.JSONDecoder().raw_decode(said)  # stdout, to which stderr is added
    assert {mutant["outcome"] for mutant in report["mutants"]} == {"unreached"}


def test_what_is_not_there(shop: Path) -> None:
    assert "there is no nowhere.py" in run(shop, "nowhere.py", status=1)


def test_tests_that_are_not_there(shop: Path) -> None:
    said = run(shop, "shop.py", tests="test_nothing.py", status=1)
    assert "the tests cannot be run" in said
    assert "test_nothing.py" in said
