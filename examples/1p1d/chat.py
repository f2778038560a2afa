"""Asks the proxy with the official OpenAI client, prints the tokens as they come, then who did what in what time.

    python examples/1p1d/chat.py --url http://127.0.0.1:9100 --prompt "Why is the sky blue?"

All that the table shows comes from the response's headers and from the proxy's /status page.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

QUESTION = (
    "Two engines share the work of answering you. One of them reads the whole question at once and keeps, for every "
    "word, what the model will want to remember of it. The other one writes the answer, one word after the other, and "
    "looks at all of those memories each time. They are two processes, and they could be two machines. So the memories "
    "must travel: page by page, straight from the memory of the first into a buffer of the second, which was asked "
    "beforehand whether there is room. Only when every page has arrived does the writing begin. If you were the second "
    "engine, and this letter were the first thing that you found in your buffer, what would you write back?"
)

WHO = {
    "tokenize": "proxy",
    "slot_wait": "proxy",
    "prefill": "{prefiller}",
    "kv_wait": "{prefiller} → {decoder}",
    "first_byte": "{decoder}",
    "decode": "{decoder}",
}


@dataclass(frozen=True)
class Answer:
    """What came back, and when: seconds from sending the question."""

    headers: Mapping[str, str]
    num_prompt_tokens: int
    num_tokens: int
    first_token_s: float
    total_s: float


def main() -> int:
    arguments = parse_arguments()
    console = Console(highlight=False)
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none needed", max_retries=0)
    try:
        model = client.models.list().data[0].id
        for prompt in arguments.prompt or [QUESTION]:
            console.rule(f"question to {model}")
            console.print(prompt, markup=False)
            console.rule("answer")
            answer = ask(client, model, prompt, arguments.max_tokens)
            console.rule()
            console.print(summary(answer))
            console.print(report(answer, phases_of(arguments.url, answer)))
    except KeyboardInterrupt:
        return 130
    except (OpenAIError, httpx.HTTPError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    if model == "tiny-model":
        console.print("The tiny model's weights are random, and so are its words. A real one: --model DIR", style="dim")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask the proxy, and show how it was done.")
    parser.add_argument("--url", default=os.environ.get("PDPROXY_URL", "http://127.0.0.1:9100"), help="the proxy")
    parser.add_argument("--prompt", action="append", help="what to ask; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=48, help="how long each answer may be")
    return parser.parse_args()


def ask(client: OpenAI, model: str, prompt: str, max_tokens: int) -> Answer:
    """Print the answer while it comes. Raises `OpenAIError`, also when the stream ends with an error."""
    started = time.monotonic()
    num_prompt_tokens, num_tokens, first_token_s = 0, 0, 0.0
    reply = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in reply.parse():
        if text := chunk.choices[0].delta.content if chunk.choices else None:
            first_token_s = first_token_s or time.monotonic() - started
            sys.stdout.write(text)
            sys.stdout.flush()
        if chunk.usage is not None:
            num_prompt_tokens, num_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    sys.stdout.write("\n")
    if not num_tokens:
        raise OpenAIError("the answer was empty")
    return Answer(reply.headers, num_prompt_tokens, num_tokens, first_token_s, time.monotonic() - started)


def phases_of(url: str, answer: Answer) -> dict[str, Any]:
    """Everything the proxy remembers of this request, its last phase included; empty when it has forgotten it."""
    attempt = answer.headers.get("x-pdproxy-attempt")
    recent = httpx.get(f"{url}/status", trust_env=False).raise_for_status().json().get("recent", [])
    return next((request for request in recent if request.get("attempt") == attempt), {})


def report(answer: Answer, phases: dict[str, Any]) -> Table:
    """A row per phase."""
    names = {role: answer.headers.get(f"x-pdproxy-{role}", "-") for role in ("prefiller", "decoder")}
    table = Table()
    table.add_column("phase", no_wrap=True)
    table.add_column("who", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    for phase, milliseconds in timings(answer, phases).items():
        table.add_row(phase.replace("_", " "), WHO.get(phase, "proxy").format(**names), f"{milliseconds:,.1f}")
    table.add_section()
    table.add_row("first token", "as seen here", f"{answer.first_token_s * 1e3:,.1f}")
    table.add_row(f"all {answer.num_tokens} tokens", "as seen here", f"{answer.total_s * 1e3:,.1f}")
    return table


def timings(answer: Answer, phases: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per phase, in order: those that were over when the headers were sent, and from /status the rest."""
    header = answer.headers.get("server-timing", "")
    known = {name: float(ms) for name, ms in re.findall(r"([\w-]+);dur=([\d.]+)", header)}
    return known | {name: phases[f"{name}_s"] * 1e3 for name in WHO if f"{name}_s" in phases}


def summary(answer: Answer) -> str:
    """Which way the request went, and what was moved."""
    path = f"{answer.headers.get('x-pdproxy-path', 'unknown')} path, {answer.num_prompt_tokens} prompt tokens"
    moved = dict(re.findall(r"(\w+)=([\d.]+)", answer.headers.get("x-pdproxy-kv", "")))
    if not moved:
        return path
    num_bytes, milliseconds = int(moved["bytes"]), float(moved["transfer_ms"])
    speed = f" ({num_bytes / milliseconds / 1e6:.2f} GB/s)" if milliseconds else ""
    pages = f"{moved['pages']} {'page' if moved['pages'] == '1' else 'pages'}"
    return f"{path}, {pages} of KV: {num_bytes:,} bytes in {milliseconds:.2f} ms{speed}"


if __name__ == "__main__":
    sys.exit(main())
