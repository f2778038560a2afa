"""The module checks what can be known to fail before anything is started. Each fault is one line that names the option
to change."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdproxy.launch.errors import PreflightError
from transfer.errors import GeometryError
from transfer.geometry import capacity, kv_geometry, load_config, parse_size

LISTENING = "0A"
MISSING = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
WITHOUT_CUDA = """
import ctypes, importlib.util, pathlib, runpy
package = importlib.util.find_spec("torch")
built = runpy.run_path(str(pathlib.Path(package.origin).with_name("version.py")))
if built.get("hip"):
    raise SystemExit
if not built.get("cuda"):
    raise SystemExit(print(f"its torch {built['__version__']} is built without CUDA"))
number = ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    why = f"cuInit says {code}" if code else "CUDA_VISIBLE_DEVICES names none"
except OSError:
    why = "there is no libcuda.so.1"
if not number.value:
    print(f"there is no GPU for its torch here ({why})")
"""
"""Prints why torch could not compute on a GPU, and nothing where it could. The driver is asked directly, because torch
takes seconds to import. An AMD GPU is left to torch."""
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
COMMAND_CHARS = 60
"""The most characters that are shown of somebody else's command line."""
PYTHON_TIMEOUT_S = 60.0
"""The seconds that an interpreter may take to start; on a cold network disk it takes long."""


@dataclass(frozen=True, slots=True)
class PortUse:
    """PortUse is a port that something is about to listen on, and the option by which to choose another."""

    port: int
    what: str
    option: str
    host: str | None = None
    """Holds the host of this port; None means that of the whole launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Buffer is a PD buffer on one rank, as the options have it."""

    size: str
    chunk_size: int
    tp_size: int = 1
    kv_cache_dtype: str | None = None
    """Holds the dtype of the KV cache; None means the model's own."""


def check_ports(host: str, uses: Sequence[PortUse]) -> None:
    """Checks that each port is valid, wanted only once on its host, and free just now. Raises `PreflightError`."""
    wanted: dict[tuple[str, int], PortUse] = {}
    for use in uses:
        place = (use.host or host, use.port)
        if not 1 <= use.port <= 65535:
            raise PreflightError(f"{use.option} {use.port} is not a port; ports are 1 to 65535")
        if place in wanted:
            raise PreflightError(_wanted_twice(wanted[place], use))
        wanted[place] = use
    for use in uses:
        _check_free(use.host or host, use)


def _wanted_twice(first: PortUse, second: PortUse) -> str:
    whose = f"{second.what} and {first.what}"
    return f"{second.option} and {first.option} are both {first.port} ({whose}); change one of them"


def _check_free(host: str, use: PortUse) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, use.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                taken = f"port {use.port} ({use.what}) is taken{_by_whom(use.port)}"
                raise PreflightError(f"{taken}; stop that, or choose another with {use.option}") from None
            where = f"{host}:{use.port} ({use.what}, {use.option})"
            raise PreflightError(f"cannot listen on {where}: {error.strerror}") from None


def _by_whom(port: int) -> str:
    """Returns `` by pid 7 (python -m http.server)``, or an empty text where /proc does not tell."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                shown = command if len(command) <= COMMAND_CHARS else f"{command[:COMMAND_CHARS].rstrip()} …"
                return f" by pid {process.name} ({shown})"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def check_modules(names: Sequence[str], python: Path | None) -> None:
    """Checks that the engines' interpreter finds each module, without importing any; None means this interpreter.
    Raises `PreflightError`."""
    if missing := _said_by(python, MISSING, *names).split():
        whose = "this Python" if python is None else f"--python {python}"
        way_out = (
            "pip install 'pdproxy[engine]' (in a checkout: scripts/install engine)"
            if "transfer" in names
            else "name with --python that of the environment in which the engines are installed"
        )
        raise PreflightError(f"{whose} has no {', '.join(missing)}; {way_out}")


def is_builtin_device(device: str) -> bool:
    """Tells whether the built-in engine can be told to compute on this device."""
    return re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None


def check_cuda(python: Path | None) -> None:
    """Checks that torch in the engines' interpreter could compute on a GPU, without importing it. Raises
    `PreflightError`."""
    if why := _said_by(python, WITHOUT_CUDA).strip():
        raise PreflightError(
            f"--device, --devices (in a file: launch.device, launch.gpus) ask for GPUs: {why}; give --device cpu and "
            "no --devices, or with --python a Python whose torch has CUDA"
        )


def _said_by(python: Path | None, script: str, *args: str) -> str:
    """Returns what a script prints that is run by this interpreter; None means our own. Raises `PreflightError`."""
    command = (str(python or sys.executable), "-c", script, *args)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PreflightError(f"--python {python} is no Python that runs: {error}") from None


def check_memory(buffers: Sequence[Buffer], memory_bytes: int) -> None:
    """Checks that PD buffers in host memory fit into it all together. Raises `PreflightError`."""
    try:
        wanted = sum(parse_size(buffer.size) * buffer.tp_size for buffer in buffers)
    except GeometryError as error:
        raise PreflightError(f"--pd-buffer-size (in a file: pd_buffer_size): {error}") from None
    if wanted > memory_bytes:
        sizes = " + ".join(f"{one.size}{f' × {one.tp_size}' if one.tp_size > 1 else ''}" for one in buffers)
        raise PreflightError(
            f"--pd-buffer-size (in a file: pd_buffer_size): {sizes} is more than the {memory_bytes / 2**30:.0f} GiB of "
            "memory that there are here; lower it"
        )


def memory_bytes() -> int:
    """Returns the bytes of memory that processes here may use: the machine's, or a container's limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says `max`
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    return min(sizes)


def check_model(model: Path) -> None:
    """Checks that the model is a folder with a config. Raises `PreflightError`."""
    if not model.is_dir():
        raise PreflightError(f"there is no model folder {model}; name one with --model (in a file: model)")
    if not (model / "config.json").is_file():
        raise PreflightError(
            f"{model} has no config.json, so it is not a model folder; name one with --model (in a file: model)"
        )


def check_buffer(
    config: object, buffer_size: str, chunk_size: int, *, tp_size: int = 1, kv_cache_dtype: str | None = None
) -> None:
    """Checks that a PD buffer has room for a page at least. `config` is the model's. Raises `PreflightError`."""
    if chunk_size < 1:
        raise PreflightError(f"--chunk-size {chunk_size} is not a number of tokens; it is 1 or more")
    try:
        geometry = kv_geometry(config, tp_size=tp_size, kv_cache_dtype=kv_cache_dtype)
        capacity(geometry, parse_size(buffer_size), chunk_size)
    except GeometryError as error:
        raise PreflightError(str(error)) from error


def config_of(model: Path) -> object:
    """Returns the model's config, with the values that the file leaves to its class. Transformers knows those, and
    takes seconds to import. Raises `PreflightError`."""
    try:
        return load_config(model)
    except GeometryError as error:
        raise PreflightError(str(error)) from error


def tiny_config_of(model: Path) -> object:
    """Returns the config of the model that is made here: it leaves nothing to its class. Raises `PreflightError`."""
    path = model / "config.json"
    try:
        config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"{path} cannot be read: {error}; remove {model}, and it is made again") from error
    return {name: value for name, value in config.items() if name != "model_type"}
