"""Bodies, as SGLang's own classes read them: run as a process, with the unpacked package on its path.

``[class, body]`` as JSON on each line of the input; what that class makes of it on each line of the output. A body with
several prompts also gets what SGLang hands out to each of them.

Only the module of the bodies is imported. Its packages' own ``__init__`` modules, which want CUDA, are left out; for
IPython's display, which a neighbour of it wants for notebooks, stands an empty module. The handing out is cut out of a
module that wants CUDA as well. Nothing else is stood in for.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
ROOMS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def body_classes(root: Path) -> ModuleType:
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    display = ModuleType("IPython.display")
    display.__dict__.update(HTML=None, display=None)
    sys.modules |= {"IPython": ModuleType("IPython"), "IPython.display": display}
    return importlib.import_module("sglang.srt.entrypoints.openai.protocol")


def hands_out(root: Path) -> Any:
    """``GenerateReqInput._normalize_bootstrap_params`` as a function of such an object and the number of requests."""
    source = (root / "sglang" / "srt" / "managers" / "io_struct.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    methods = next(node.body for node in classes if node.name == "GenerateReqInput")
    wanted = [node for node in methods if isinstance(node, ast.FunctionDef) and "bootstrap_params" in node.name]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), "io_struct.py", "exec"), names)
    return names[wanted[0].name]


def main(root: Path) -> None:
    protocol, hand_out = body_classes(root), hands_out(root)
    for line in sys.stdin:
        name, body = json.loads(line)
        read = getattr(protocol, name).model_validate(body)
        told = {field: getattr(read, field, None) for field in (*body, "routed_dp_rank", "disagg_prefill_dp_rank")}
        if isinstance(body.get("bootstrap_room"), list):
            request = SimpleNamespace(
                **{field: getattr(read, field) for field in ROOMS},
                bootstrap_pair_key=None,
                decode_tp_size=None,
                parallel_sample_num=read.n,
            )
            hand_out(request, len(read.prompt) * read.n)
            told |= {"each": [list(each) for each in zip(*(getattr(request, f) for f in ROOMS), strict=True)]}
        print(json.dumps(told, default=lambda model: model.model_dump(exclude_unset=True)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
