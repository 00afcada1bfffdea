"""The requests of an offline run: lines of its driver enter, a bar and plain lines leave."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.unit.launch.test_status import event, served
from vllm_memprof.engines.driver import Options
from vllm_memprof.engines.prompts import Request, run_all, tokens_said
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.live import LiveView, PlainView, Shown
from vllm_memprof.launch.painting import describe_memory
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.requests import Requests
from vllm_memprof.report.language import language

GIB = 1 << 30
S = 1_000_000_000
ENDED = "request 3/12: 310 prompt tokens, 2 output tokens, 0.41 s, 75 s left"


@pytest.fixture
def progress() -> EngineProgress:
    """Two ranks, the second holds more."""
    found = served()
    for rank in range(2):
        sample = {
            "allocated_bytes": (20 + rank) * GIB,
            "reserved_bytes": (50 + rank) * GIB,
            "allocated_run_peak_bytes": (40 + rank) * GIB,
            "reserved_run_peak_bytes": (55 + rank) * GIB,
        }
        found.fold(f"w{rank}", event("sample", 6, step=1, steps=1, **sample))
    return found


def shown(**fields: Any) -> Shown:
    known = {"sampled": True, "requests": True, "clock": lambda: 30 * S}
    return Shown("memprof offline M", 0, **{**known, **fields})


def read(requests: Requests, *lines: str, now_ns: int = 10 * S) -> Requests:
    for line in lines:
        requests.read(line, now_ns)
    return requests


def test_lines_of_requests() -> None:
    requests = read(Requests(), "requests to run: 12", "requested", ENDED)
    assert (requests.done, requests.total) == (3, 12)
    assert list(requests.fresh) == [ENDED]
    assert requests.end_t_ns == 85 * S
    read(requests, "request 4/12: skipped (a.png): is refused")
    assert requests.fresh[-1] == "request 4/12: skipped (a.png): is refused"


def test_lines_arrive_in_any_pieces_and_without_secrets(tmp_path: Path) -> None:
    pump = LogPump(tmp_path / "engine.log")
    write_fd = os.dup(pump.fd)
    pump.start()
    printed = f"{ENDED}\nrequest 4/12: skipped (a.png): sk-abcdefghijklmnopqrstuvwx is refused\n"
    for at in range(0, len(printed), 7):
        os.write(write_fd, printed[at : at + 7].encode())
    os.close(write_fd)
    pump.join(10)
    first, second = pump.requests.fresh
    assert first == ENDED
    assert second.startswith("request 4/12: skipped (a.png): ")
    assert "sk-abcdefghijklmnopqrstuvwx" not in second


def test_before_the_first_request_has_ended_nothing_is_estimated() -> None:
    requests = Requests()
    assert (requests.total, requests.end_t_ns) == (None, None)
    read(requests, "requests to run: 2")
    assert (requests.done, requests.total, requests.end_t_ns) == (0, 2, None)


def test_the_lines_are_those_that_the_driver_prints(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([tokens_said(2, 1), ValueError("too long"), tokens_said(2, 1)])

    def generate(batch: Any) -> list[str]:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return [answer]

    run_all(
        generate, [Request(name, {"prompt": name}) for name in "abc"], Options("m", on_error="skip")
    )
    requests = read(Requests(), *capsys.readouterr().out.splitlines(), now_ns=5 * S)
    assert (requests.done, requests.total, requests.end_t_ns) == (3, 3, 5 * S)
    said = [line.params["what"] for line in requests.fresh]
    assert [getattr(what, "params", {}).get("prompt") for what in said] == ["2", None, "2"]
    assert requests.fresh[1] == "request 2/3: skipped (b): too long"


def test_memory_is_that_of_the_fullest_rank_and_says_when_it_is_not_of_now(
    progress: EngineProgress,
) -> None:
    memory = "TP1: allocated 21.00 GiB (peak 41.00), reserved 51.00 (peak 56.00)"
    assert describe_memory(progress, shown()) == memory
    assert describe_memory(progress, shown(sampled=False)) == f"{memory} at the last phase"
    assert describe_memory(EngineProgress(), shown()) is None
    phases = describe_memory(served(), shown())
    assert phases is not None
    assert "allocated - GiB (peak -)" in phases  # unknown, not 0


def test_a_plain_line_per_request(progress: EngineProgress) -> None:
    stream = io.BytesIO()
    view = PlainView(shown(), stream, title=False)
    view.update(progress)
    read(progress.requests, "requests to run: 12", "engine's own line", ENDED)
    view.update(progress)
    view.update(progress)
    lines = [line for line in stream.getvalue().decode().splitlines() if "request" in line]
    assert lines == [
        "   30.0s request 3/12: 310 prompt tokens, 2 output tokens, 0.41 s, 75 s left | "
        "TP1: allocated 21.00 GiB (peak 41.00), reserved 51.00 (peak 56.00)"
    ]
    read(progress.requests, ENDED.replace("3/12", "4/12"))
    view.close()
    assert stream.getvalue().decode().splitlines()[-1].startswith("   30.0s request 4/12: 310")


def test_quiet_prints_no_line_of_a_request(progress: EngineProgress) -> None:
    stream = io.BytesIO()
    view = PlainView(shown(requests=False), stream, title=False)
    read(progress.requests, "requests to run: 12", ENDED)
    view.update(progress)
    view.close()
    assert b"request" not in stream.getvalue()


def painted(
    progress: EngineProgress, width: int, *printed: str, lang: str = "en", **options: Any
) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, force_terminal=True, **options)
    view = LiveView(shown(say=language(lang)), console=console)
    read(progress.requests, *printed)
    progress.output.append("the engine's last line")
    drawn = view._painting(progress, 30 * S)
    view.close()
    plain = Console(file=io.StringIO(), width=width, highlight=False, **options)
    plain.print(drawn)
    assert isinstance(plain.file, io.StringIO)
    return plain.file.getvalue().splitlines()


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_bar(progress: EngineProgress, width: int, lang: str) -> None:
    lines = painted(progress, width, "requests to run: 12", ENDED, lang=lang)
    assert max(map(cell_len, lines)) <= width
    bar, memory, note = lines[-3:]
    said = language(lang)
    assert {"en": "requests 3/12", "zh": "请求 3/12"}[lang] in bar
    assert {"en": "0:00:55 left", "zh": "剩余 0:00:55"}[lang] in bar
    assert "━" in bar
    for size in ("21.00", "41.00", "51.00", "56.00"):
        assert size in memory
    assert ("peaks since the process began" in note) == (lang == "en")
    assert said("the engine's last line") not in "".join(lines)


def test_a_single_request_has_no_bar(progress: EngineProgress) -> None:
    lines = painted(progress, 80, "requests to run: 1")
    assert not any("━" in line for line in lines)
    assert lines[-1].startswith("the engine's last line")
    lines = painted(progress, 80, "requests to run: 2")
    assert "requests 0/2" in lines[-3]
    assert "time left unknown" in lines[-3]
