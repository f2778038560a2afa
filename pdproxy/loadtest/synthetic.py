"""The module makes the two samples in ``samples/``: they are no real traffic, only the published formats with
traffic-like numbers in them.

    python -m pdproxy.loadtest.synthetic --out pdproxy/loadtest/samples --seed 1
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pdproxy.loadtest.arrivals import Pace, arrivals
from pdproxy.loadtest.lengths import LogNormal
from pdproxy.loadtest.traces import AZURE_COLUMNS, BLOCK_TOKENS, SAMPLES

NUM_ROWS = 240
SEED = 1
_FIRST_DAY = datetime(2025, 1, 1, 12)
_AGAIN = 0.45
"""The share of the requests of the first sample that go on where an earlier one ended."""


def mooncake_like(seed: int, num_rows: int = NUM_ROWS) -> str:
    """Returns a sample of long prompts in bursts, as JSON Lines; many prompts begin like an earlier one."""
    dice = random.Random(f"{seed} mooncake-like")
    times = arrivals("gamma", Pace(rate=2.0), dice, burstiness=3.0)
    lines = [
        msgspec.json.encode({"timestamp": round(at_s * 1000), **row})
        for at_s, row in zip(times, islice(_talks(dice), num_rows), strict=False)
    ]
    return "".join(f"{line.decode()}\n" for line in lines)


def azure_like(seed: int, num_rows: int = NUM_ROWS) -> str:
    """Returns a sample of shorter prompts that share nothing, as CSV."""
    dice = random.Random(f"{seed} azure-like")
    times = islice(arrivals("gamma", Pace(rate=4.0), dice, burstiness=2.0), num_rows)
    prompts, answers = LogNormal(1000, 0.9, 8000), LogNormal(130, 0.8, 1000)
    lines = [",".join(AZURE_COLUMNS)]
    for at_s in times:
        at = _FIRST_DAY + timedelta(seconds=at_s)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{prompts.draw(dice)},{answers.draw(dice)}")
    return "\n".join(lines) + "\n"


def _talks(dice: random.Random) -> Iterator[dict[str, object]]:
    """Yields requests; some of them are an earlier one's next turn, with all of its blocks that were full."""
    fresh = count()
    prompts, messages, answers = LogNormal(2500, 0.9, 24_000), LogNormal(600, 0.7, 4000), LogNormal(180, 0.8, 1200)
    earlier: list[tuple[int, int, list[int]]] = []
    while True:
        blocks: list[int] = []
        length = prompts.draw(dice)
        if earlier and dice.random() < _AGAIN:
            past, answered, known = earlier.pop(dice.randrange(len(earlier)))
            blocks = known[: past // BLOCK_TOKENS]
            length = past + answered + messages.draw(dice)
        blocks = blocks + [next(fresh) for _ in range(-(-length // BLOCK_TOKENS) - len(blocks))]
        answer = answers.draw(dice)
        earlier.append((length, answer, blocks))
        yield {"input_length": length, "output_length": answer, "hash_ids": blocks}


def main(
    out: Annotated[Path, typer.Option(help="The folder.")],
    seed: Annotated[int, typer.Option(help="The same seed, the same files.")] = SEED,
) -> None:
    """Write both samples."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("mooncake", mooncake_like(seed)), ("azure", azure_like(seed))):
        path = out / SAMPLES[name].name
        path.write_text(text, encoding="utf-8")
        typer.echo(f"{path}: {text.count(chr(10))} lines, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
