"""What the benchmark of served tokens says, and when it fails; the servers are written down."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bench_serving import MOST_BYTES, Served, recorded, report
from tests.support.load import Load

OPTIONS = argparse.Namespace(model="m", clients=32, minutes=5.0, pairs=2, sample="16")
PLAIN = Served("plain", 200.0, 400, 0.5, 0, 0, 0)
OBSERVED = Served("memprof", 199.0, 400, 0.5, 0, 1 << 20, 900)
FOUR = [PLAIN, OBSERVED, replace(OBSERVED, tokens_per_second=198.0), PLAIN]


def test_the_ratio_with_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(FOUR, OPTIONS) == 0
    printed = capsys.readouterr().out
    assert "| 200.0 | 198.5 | 0.9925 (0.9900 to 0.9950) | 0.0% |" in printed
    assert "FAILED" not in printed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(OBSERVED, failures=1), "requests were lost"),
        (replace(OBSERVED, largest_bytes=MOST_BYTES + 1), "more than its bound"),
        (replace(OBSERVED, samples=0), "nothing was sampled"),
    ],
)
def test_what_fails(wrong: Served, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([PLAIN, wrong, OBSERVED, PLAIN], OPTIONS) == 1
    assert said in capsys.readouterr().out


def test_bytes_of_the_process_that_wrote_the_most() -> None:
    folder = Path(__file__).parents[2] / "data" / "serving" / "tp2"
    sizes = {
        path.stem: path.stat().st_size
        + sum(each.stat().st_size for each in (folder / "samples" / path.stem).glob("*"))
        for path in (folder / "events").iterdir()
    }
    largest, samples = recorded(folder)
    assert largest == max(sizes.values()) > 32_000
    assert samples > 10
    assert recorded(folder / "absent") == (0, 0)


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    load = Load(9, "m", clients=2).start()
    limit = time.monotonic() + 30
    while not load.answers.failures:
        assert time.monotonic() < limit
        time.sleep(0.02)
    answers = load.stop()
    assert answers.tokens == []
    assert "refused" in answers.failures[0]
