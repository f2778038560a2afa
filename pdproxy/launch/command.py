"""The launcher's command line: options in, exit status out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdproxy.launch.errors import LaunchError
from pdproxy.launch.one_p_one_d import OnePOneD, launch

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def one_p_one_d(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="after --: run this once all are ready; it finds the proxy in PDPROXY_URL"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="model folder [default: a tiny random model, made once]")] = None,
    work_dir: Annotated[Path, typer.Option(help="where the tiny model is kept")] = Path(".demo"),
    host: Annotated[str, typer.Option(help="address everything listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the proxy's port")] = 9100,
    prefill_port: Annotated[int, typer.Option(help="the prefiller's port")] = 7100,
    decode_port: Annotated[int, typer.Option(help="the decoder's port")] = 7200,
    receiver_port: Annotated[int, typer.Option(help="where the decoder takes KV reservations")] = 7300,
    notify_port: Annotated[int, typer.Option(help="where the proxy takes KV signals")] = 7500,
    pd_buffer_size: Annotated[str, typer.Option(help="the decoder's PD buffer, as 64MiB")] = "64MiB",
    chunk_size: Annotated[int, typer.Option(help="tokens per page")] = 256,
    device: Annotated[str, typer.Option(help="where the engines compute: cpu, cuda or cuda:N")] = "cpu",
    timeout: Annotated[float, typer.Option(help="seconds until all must be ready")] = 180.0,
    log_dir: Annotated[Path | None, typer.Option(help="logs into files there [default: the terminal]")] = None,
    once: Annotated[bool, typer.Option("--once", help="stop everything when the command has ended")] = False,
) -> None:
    """Start one prefiller, one decoder and the proxy in front of them on this machine, until Ctrl-C.

    Ports, model and sizes are checked before anything is started. Whatever ends this process, its children end too.
    """
    options = OnePOneD(
        model=model,
        work_dir=work_dir,
        host=host,
        port=port,
        prefill_port=prefill_port,
        decode_port=decode_port,
        receiver_port=receiver_port,
        notify_port=notify_port,
        pd_buffer_size=pd_buffer_size,
        chunk_size=chunk_size,
        device=device,
        timeout_s=timeout,
        log_dir=log_dir,
        is_once=once,
    )
    console = Console(stderr=True)
    try:
        raise typer.Exit(asyncio.run(launch(options, command or [], console)))
    except LaunchError as error:
        console.print(f"launch: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
