"""The two trace formats, and the samples that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.loadtest.errors import TraceError
from pdproxy.loadtest.synthetic import SEED, azure_like, mooncake_like
from pdproxy.loadtest.traces import SAMPLES, TraceRow, read_trace

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 26000, "input_length": 12, "output_length": 0, "hash_ids": [46]}

{"timestamp": 30535.5, "input_length": 6472, "output_length": 26}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:01:00.017335+00:00,2399,6
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncakes(tmp_path: Path) -> None:
    """In order of time, from zero; an answer of nothing is asked for as one of one."""
    assert read_trace(written(tmp_path, MOONCAKE)) == [
        TraceRow(0.0, 12, 1, (46,)),
        TraceRow(pytest.approx(1.482), 6955, 52, (46, 47, 48)),
        TraceRow(pytest.approx(4.5355), 6472, 26),
    ]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (AZURE, [(0.0, 4808, 10), (0.052, 3180, 8)]),
        (AZURE_2024, [(0.0, 2162, 5), (60.007405, 2399, 6)]),
        ("\ufeff" + AZURE.replace("\n", "\r\n"), [(0.0, 4808, 10), (0.052, 3180, 8)]),
    ],
    ids=["of 2023", "of 2024", "as Windows writes it"],
)
def test_azures(tmp_path: Path, text: str, rows: list[tuple[float, int, int]]) -> None:
    read = read_trace(written(tmp_path, text))
    assert [(row.at_s, row.prompt_tokens, row.answer_tokens) for row in read] == [
        (pytest.approx(at_s, abs=1e-6), prompt, answer) for at_s, prompt, answer in rows
    ]


def test_only_the_first_rows(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, AZURE), limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "neither"),
        ("a,b\n1,2\n", "TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "nothing"),
        (AZURE + "yesterday,1,2\n", "line 4"),
        (AZURE + "2023-11-16 18:17:05,,2\n", "line 4"),
        (AZURE + "2023-11-16 18:17:05\n", "line 4"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 5"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(written(tmp_path, text))


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00\xff", b'{"timestamp": 1}\n\xff', b"a" * 200_000])
def test_what_is_no_text(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "packed.csv.gz"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=r"packed.csv.gz"):
        read_trace(file)


@pytest.mark.parametrize(("name", "make"), [("mooncake", mooncake_like), ("azure", azure_like)])
def test_the_samples_are_what_their_script_writes(name: str, make: object) -> None:
    assert callable(make)
    assert SAMPLES[name].read_text(encoding="utf-8") == make(SEED)


def test_the_samples_have_traffic_in_them() -> None:
    mooncake, azure = (read_trace(SAMPLES[name]) for name in ("mooncake", "azure"))
    assert len(mooncake) == len(azure) == 240
    blocks = [block for row in mooncake for block in row.blocks]
    assert 1 - len(set(blocks)) / len(blocks) > 0.2  # shared
    assert all(len(row.blocks) == -(-row.prompt_tokens // 512) for row in mooncake)
    assert not any(row.blocks for row in azure)
    assert 40 < azure[-1].at_s < 90
