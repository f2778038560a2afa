"""Finds the small changes that can be made to a source file. No I/O.

A change replaces one piece of the text and nothing else, so that every other line keeps its number and its look.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

OPPOSITES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
"""The pattern by which an operator is found, and the text that takes its place."""
EXTREMES = {"min": "max", "max": "min"}
"""The functions that take each other's place."""
PAUSES = frozenset({"sleep", "checkpoint", "lowlevel"})
"""The names of calls that only let time pass, or others run."""
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)


@dataclass(frozen=True, slots=True)
class Change:
    """A `Change` is one piece of a file's text, as a range of its bytes, and what is written in its place."""

    path: str
    line: int
    statement: range
    """The lines of the statement that the change is in; of a statement with a body, the lines above the body."""
    kind: str
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.kind})"


def find_changes(path: str, source: bytes) -> list[Change]:
    """Returns all changes to a file that leave it a program, in the order of its text. Raises `SyntaxError`."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    changes = {(change.start, change.end, change.text): change for change in finder.found}
    return [change for _, change in sorted(changes.items()) if _is_program(change.apply(source))]


def _is_program(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    """A `_Finder` collects changes in `found`. It leaves annotations, decorators, docstrings and type checkers'
    branches as they are."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Change] = []
        self._path = path
        self._source = source
        self._statement = range(1, 2)
        self._line_starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]

    # ── where something is ──────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> bytes:
        return self._source[self._start(node) : self._end(node)]

    def _add(self, kind: str, text: bytes, start: int, end: int) -> None:
        line = self._source.count(b"\n", 0, start) + 1
        text += b"\n" * (self._source.count(b"\n", start, end) - text.count(b"\n"))
        self.found.append(Change(self._path, line, self._statement, kind, start, end, text))

    def _replace(self, node: ast.expr | ast.stmt, kind: str, text: bytes) -> None:
        self._add(kind, text, self._start(node), self._end(node))

    def _replace_between(self, left: ast.expr, right: ast.expr, kind: str, pattern: str, text: str) -> None:
        """Replaces the only operator in the text between two operands."""
        start, end = self._end(left), self._start(right)
        found = re.search(pattern.encode(), self._source[start:end])
        if found is not None:
            self._add(kind, text.encode(), start + found.start(), start + found.end())

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outer, self._statement = self._statement, _own_lines(node)
        super().visit(node)
        self._statement = outer

    # ── what is not changed ─────────────────────────────────────────────────────────────────────────────────────────

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._visit_body(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            return  # __slots__, __all__
        self._visit_statement(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)

    # ── what is ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise)):
            self._visit_statement(node)
        else:
            super().generic_visit(node)

    def _visit_statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        is_local = isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)
        if not is_local and isinstance(node, STATEMENTS):
            self._replace(node, "pause skipped" if _is_pause(node) else "statement removed", b"pass")
        super().generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._replace_between(left, right, "comparison", *OPPOSITES[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, "and/or", rf"\b{old}\b", new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, "not removed", b"(" + self._text(node.operand) + b")")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, "constant", str(not node.value).encode())
        elif isinstance(node.value, (int, float)):
            self._replace(node, "constant", repr(node.value + 1).encode())
            self._replace(node, "constant", repr(node.value - 1).encode())

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            self._replace(node.func, "min/max", EXTREMES[node.func.id].encode())
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node.value, "return value", b"None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "break/continue", b"continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break/continue", b"break")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Changes nothing: Python 3.11 does not know where the parts of an f-string are."""

    def _negate(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace(test, "condition negated", b"(not (" + self._text(test) + b"))")


def _own_lines(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
    return range(node.lineno, last + 1)


def _is_pause(node: ast.stmt) -> bool:
    """Tells whether the statement is ``await asyncio.sleep(…)`` or its like."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Await)):
        return False
    call = node.value.value
    return isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in PAUSES


def lines_of(change: Change, source: bytes) -> tuple[str, str]:
    """Returns the changed line before and after, without its indentation; of several lines the first."""
    before = source.splitlines()[change.line - 1]
    after = change.apply(source).splitlines()[change.line - 1]
    return before.decode().strip(), after.decode().strip()
