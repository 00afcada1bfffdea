"""Bytes to lines: encodings, packing, line ends, and what a long file costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from vllm_memprof.logs import lines
from vllm_memprof.logs.lines import NEEDLES, read_chunks, read_lines, strip_markup

TEXT = "INFO Available KV cache memory: 43.40 GiB\nINFO GPU KV cache size: 632,064 tokens\n"
FILLER = b'INFO:     10.0.0.1:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


def lines_of(data: bytes) -> list[lines.LogLine]:
    return list(read_lines(read_chunks(data[at : at + 4096] for at in range(0, len(data), 4096))))


def texts(data: bytes) -> list[str]:
    return [line.text for line in lines_of(data)]


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        b"\xfe\xff" + TEXT.encode("utf-16-be"),
        TEXT.replace("\n", "\r\n").encode(),
    ],
    ids=["utf-8", "bom", "utf-16", "le", "be", "be bom", "crlf"],
)
def test_encodings(data):
    assert texts(data) == TEXT.splitlines()


def test_a_last_line_without_an_end():
    assert texts(b"a\nb") == ["a", "b"]
    assert texts(b"") == []


def test_progress_bars_are_split_at_carriage_returns_and_share_a_line_number():
    found = lines_of(b"one\n 10%|#\r 20%|##\rINFO Available KV cache memory: 1.00 GiB\nthree\n")
    assert [(line.number, line.text) for line in found] == [
        (1, "one"),
        (2, " 10%|#"),
        (2, " 20%|##"),
        (2, "INFO Available KV cache memory: 1.00 GiB"),
        (3, "three"),
    ]


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("\x1b[36m(Worker_TP0 pid=7)\x1b[0;0m INFO Available", "(Worker_TP0 pid=7) INFO Available"),
        ("\x1b[1;32mINFO\x1b[0m \x1b]8;;x\x1b\\link\x1b]8;;\x1b\\", "INFO link"),
        ("[36m(Worker_TP0 pid=7)[0;0m INFO", "(Worker_TP0 pid=7) INFO"),
        ("> > INFO took", "INFO took"),
        ("&gt; INFO 1 &lt; 2 &amp; &quot;x&quot;", 'INFO 1 < 2 & "x"'),
        ("Available memory\uff1a43.40\u00a0GiB\uff0c total", "Available memory:43.40 GiB, total"),
        ("\uff14\uff13\uff0e\uff14\uff10 GiB", "43.40 GiB"),
        ("\u22120.87 GiB", "-0.87 GiB"),
        ("KV cache memory: **44.30** GiB", "KV cache memory: 44.30 GiB"),
        ("<code>took 9.19 GB</code>", "took 9.19 GB"),
        ("with zero\u200bwidth \x00 and nul  ", "with zerowidth  and nul  "),
        ("model='a[0]', x[12m", "model='a[0]', x"),
    ],
)
def test_plain(dirty, expected):
    assert strip_markup(dirty) == expected


def test_a_line_without_an_end_is_read_in_pieces(monkeypatch):
    data = b"x" * 5_000_000 + b" INFO Available KV cache memory: 43.40 GiB " + b"y" * 5_000_000
    found = lines_of(data)
    assert max(len(line.text) for line in found) <= lines.MAX_LINE_BYTES
    assert all(line.cut for line in found[:-1])
    assert any("Available KV cache memory: 43.40 GiB" in line.text for line in found)


def test_memory_does_not_grow_with_the_file():
    def endless(size: int) -> Iterator[bytes]:
        for _ in range(size):
            yield FILLER * 4000

    def peak(size: int) -> int:
        tracemalloc.start()
        for _ in read_lines(endless(size)):
            pass
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    assert peak(200) < peak(40) * 1.2 + 1_000_000


def test_far_down_only_lines_near_a_needle_are_handed_on(monkeypatch):
    monkeypatch.setattr(lines, "DENSE_BYTES", 1000)
    hit = b"INFO Available KV cache memory: 43.40 GiB\n"
    data = FILLER * 20_000 + hit + FILLER * 20_000
    found = lines_of(data)
    assert 30 < len(found) < 20_000
    at = next(i for i, line in enumerate(found) if "Available" in line.text)
    assert found[at].number == 20_001
    assert len(found) - at == 1 + lines.LINES_AFTER
    assert found[at].follows
    assert not found[at - lines.LINES_BEFORE].follows


def test_a_figure_per_step_is_handed_on_once_per_process(monkeypatch):
    monkeypatch.setattr(lines, "DENSE_BYTES", 0)
    monkeypatch.setattr(lines, "LINES_AFTER", 0)
    monkeypatch.setattr(lines, "LINES_BEFORE", 0)
    line = b"(Worker_TP%d pid=1) DEBUG 00:00:%02d torch reserved memory: 5%d.00 GiB, "
    line += b"torch allocated memory: 4.00 GiB\n"
    data = b"".join(line % (i % 2, i % 60, i % 3) for i in range(600))
    assert len(texts(data)) == 6


def test_needles_do_not_hit_ordinary_lines():
    stats = b"INFO [loggers.py:127] Running: 8 reqs, GPU KV cache usage: 9.1%, "
    stats += b"Prefix cache hit rate: 1.0%\n"
    assert not any(needle in FILLER or needle in stats for needle in NEEDLES)
