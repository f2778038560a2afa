"""What comes from a peer is never unpickled: nothing here can turn bytes into code, or calls what in NIXL would."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("pdproxy", "transfer") for path in (ROOT / package).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    "get_serialized_descs",  # NIXL's: pickle
    "deserialize_descs",
    "send_pyobj",  # pyzmq's: pickle
    "recv_pyobj",
    "load_pickle",
    "eval",
    "exec",
}
LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load"}


def names_in(path: Path) -> set[str]:
    """Modules imported, and whatever is named or called, with what it is an attribute of."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)} - {"eval"}  # a model's `eval()` is another thing
    return found


def forbidden(path: Path) -> set[str]:
    return names_in(path) & (MODULES | CALLS | LOADERS)


def test_nothing_is_unpickled() -> None:
    assert len(FILES) > 300, "where have they gone?"
    found = {str(path.relative_to(ROOT)): forbidden(path) for path in FILES}
    assert not {path: names for path, names in found.items() if names}


def test_the_check_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for text in ("import pickle", "from marshal import loads", "torch.load(x)", "a.b.deserialize_descs(x)", "eval(x)"):
        path.write_text(text)
        assert forbidden(path), text
    path.write_text("model.eval()")
    assert not forbidden(path)
