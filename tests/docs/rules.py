"""What becomes of each command in the documentation: it is run, or checked, or stands in a list with the reason.

A command that no rule knows fails its test. To make it one that is known, give its program a ``command.py`` with a
typer `app`: then its options are checked. Or put it into `LISTED`, with the reason why it is neither run nor checked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

LISTED = {
    r"(\./)?scripts/install\b.*": "installs; tests/scripts/test_install_script.py has it do so without a network",
    r"source \.venv/bin/activate": "the shell's own",
    r"(export \w+=|kill %).*": "the shell's own",
    r"(pip|apt|apt-get) install .*|pip wheel .*": "installs from elsewhere",
    r"(\./)?scripts/test\b.*": "is what runs this",
    r"(\./)?scripts/(lint|check)": "is what a change is checked with, together with the tests",
    r"(\./)?scripts/test_compiled": "compiles for minutes; its tests are those of the hot path",
    r"(\./)?scripts/dev/mutants .*": "takes minutes; tests/scripts/test_mutants.py runs it on a package of one file",
    r"(\./)?scripts/check_kernel\b.*": "tests/pdproxy/admission/test_check_kernel.py runs it, in smaller worlds",
    r"(\./)?scripts/check_transfer\b.*": "tests/transfer/test_check_transfer.py runs it, in smaller worlds",
    r"(\./)?scripts/check_gpu\b.*": "needs a GPU; tests/scripts/test_check_gpu.py runs it without one",
    r"(\./)?scripts/test_vllm": "needs vLLM, which takes 4 GB",
    r"(\./)?examples/1p1d/run\.sh( --once)?": "tests/e2e/test_demo.py runs it",
    r"pdproxy (check|status)\b.*": "asks engines, or a proxy, that run; tests/pdproxy/inspection does it",
    r"vllm serve .*": "needs vLLM, on GPUs",
    r"python -m sglang\.launch_server .*": "needs SGLang, on GPUs",
    r"(docker|podman) .*": "needs an engine for containers; tests/examples/test_container.py has what they would run",
    r"(kubectl|helm) .*": "needs a cluster; tests/examples/test_kubernetes.py renders and checks what it would get",
    r"systemctl .*": "needs systemd at work; tests/examples/test_systemd.py has it check the unit",
    r"python3 -m venv .*|/opt/pdproxy/bin/pip install .*|install -.*": "installs as root",
    r"… .*": "a part of a command",
}
"""Patterns of whole commands."""

ASKS = ("curl",)
"""Programs that ask a proxy which runs already."""
RUN = (["pdproxy", "pages"], ["pdproxy", "keys"], ["pdproxy", "--version"])
"""What ends by itself, at once, and needs nobody."""
SMALLER = {
    ("simulate",): {"--requests": "200"},
    ("loadtest",): {
        "--rate": "2",
        "--duration": "1",
        "--warmup": "0",
        "--max-runs": "1",
        "--max-prompt": "99",
        "--max-answer": "9",
        "--arrivals": "constant",
    },
    ("loadtest", "--trace"): {"--requests": "2", "--max-answer": "9"},
    ("loadtest", "compare"): {},
}
"""What is run with less to do than the example says; the last of these that it has all words of counts."""
TOO_LONG = {"simulate": {"fit", "check"}, "loadtest": {"--faults"}}
"""Words that make it wait for files, or for minutes: it is only checked then."""
HOUSE = "--cluster"
ADDRESS = "http://127.0.0.1:9100"
"""What stands in for a house of an example's own."""
ENDS = {"simulate": (0, 1), "loadtest": (0, 3, 5)}
"""Exit statuses that are no fault of the example: a target that nothing meets, a busy machine."""
SERVICES = (["python", "-m", "transfer.engine"], ["pdproxy", "serve"])


def reason(words: Sequence[str]) -> str | None:
    """Why it is neither run nor checked; None: there is no such reason."""
    line = " ".join(words)
    return next((why for pattern, why in LISTED.items() if re.fullmatch(pattern, line)), None)


def is_house(commands: Sequence[Sequence[str]]) -> bool:
    """Engines and a proxy in front of them, all on this machine: to be run together, as they stand there."""
    return all(any(starts(one, service) for one in commands) for service in SERVICES)


def is_service(words: Sequence[str]) -> bool:
    return any(starts(words, service) for service in SERVICES)


def is_run(words: Sequence[str]) -> bool:
    return any(starts(words, program) for program in RUN)


def is_smaller(words: Sequence[str]) -> bool:
    """Run, with `SMALLER` put in."""
    return words[0] == "pdproxy" and words[1] in TOO_LONG and TOO_LONG[words[1]].isdisjoint(words[2:])


def smaller(words: Sequence[str]) -> Sequence[str]:
    """Of two options that say the same, the last counts."""
    if HOUSE in words:
        at = words.index(HOUSE)
        words = [*words[:at], ADDRESS, *words[at + 2 :]]
    more = next(options for names, options in reversed(SMALLER.items()) if set(names) <= set(words))
    return [*words, *(word for option in more.items() for word in option)]


def asks(words: Sequence[str]) -> bool:
    """Of the proxy of the README's house: by curl, or by one of the examples' own programs."""
    return words[0] in ASKS or (words[0].endswith("python") and "examples/1p1d/chat.py" in words)


def starts(words: Sequence[str], program: Sequence[str]) -> bool:
    return list(words[: len(program)]) == list(program)


def told(words: Sequence[str]) -> str:
    return shlex.join(words)
