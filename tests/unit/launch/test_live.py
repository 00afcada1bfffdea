"""What the user sees: at widths 80 and 120, without colour, with nothing known yet."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from vllm_memprof.launch.live import GuardedView, LiveView, PlainView, Shown
from vllm_memprof.launch.painting import draw_ranks
from vllm_memprof.launch.progress import EngineProgress

GIB = 1 << 30


def event(kind: str, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t_ns": int(seconds * 1e9), **fields}


def phase(
    name: str, edge: str, id_: int, seconds: float, reserved: int | None = None, **fields: Any
) -> dict[str, Any]:
    snapshot = {
        "reserved_bytes": reserved,
        "allocated_run_peak_bytes": reserved,
        "non_torch_bytes": None,
    }
    return event("phase", seconds, phase=name, edge=edge, id=id_, snapshot=snapshot, **fields)


@pytest.fixture
def progress() -> EngineProgress:
    progress = EngineProgress()
    for rank in (1, 0):
        file = f"h-{rank}.jsonl"
        progress.fold(
            file, event("process", 0, pid=rank + 10, role="unknown", versions={"vllm": "0.23.0"})
        )
        progress.fold(file, event("identity", 0, role="worker", rank=rank, label=f"TP{rank}"))
        progress.fold(file, phase("hccl_init", "before", 1, 1))
        progress.fold(file, phase("communicator", "before", 2, 1))
        progress.fold(file, phase("communicator", "after", 2, 2))
        progress.fold(file, phase("hccl_init", "after", 1, 2, reserved=0))
        progress.fold(file, phase("profile_run", "before", 3, 4, reserved=9 * GIB))
        progress.fold(file, phase("mm_profile", "before", 4, 5))
    return progress


@pytest.mark.parametrize("width", [80, 120])
def test_table(progress, width):
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    console.print(draw_ranks(progress, Shown("memprof serve M", 0), int(7.25e9), width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("memprof serve M  7 s")
    first, second = (line for line in lines if line.startswith("TP"))
    assert first.startswith("TP0")
    assert second.startswith("TP1")
    assert "mm_profile" in first
    assert "2.2" in first or "2.3" in first
    assert "9.00" in first
    assert "-" in first  # non-torch is unknown, not 0
    assert "\x1b" not in console.file.getvalue()


def test_before_any_rank_reports():
    progress = EngineProgress()
    progress.fold("f", event("process", 0, pid=1, role="api"))
    console = Console(file=io.StringIO(), width=80)
    console.print(draw_ranks(progress, Shown("t", 0), 1, 80))
    assert "engine is starting (API server up)" in console.file.getvalue()


def test_plain_view_never_breaks_a_line_of_the_engine(progress):
    stream = io.BytesIO()
    view = PlainView(Shown("title", 0, output=True), stream)
    view.output(b"half a line")
    view.update(progress)
    view.update(progress)
    view.output(b"next\n")
    text = stream.getvalue().decode()
    assert text.startswith("title\nhalf a line\n")
    assert text.count("hccl_init") == 2
    assert "    2.0s TP0 hccl_init 0.00 GiB reserved, peak 0.00, non-torch - (1.0 s)\n" in text
    assert text.endswith("\nnext\n")


def test_a_failed_phase_says_so(progress):
    progress.fold(
        "h-0.jsonl", phase("mm_profile", "after", 4, 6, error="RuntimeError: NPU out of memory")
    )
    stream = io.BytesIO()
    PlainView(Shown("", 0), stream, title=False).update(progress)
    assert (
        b"mm_profile - GiB reserved, peak -, non-torch - (1.0 s) FAILED: RuntimeError"
        in stream.getvalue()
    )
    assert progress.first_error == (
        6_000_000_000,
        "TP0",
        "mm_profile",
        "RuntimeError: NPU out of memory",
    )


def test_live_view_prints_output_above_and_then_passes_it_through(progress, capfdbinary):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    view = LiveView(Shown("title", 0, output=True), console=console)
    view.update(progress)
    view.output(b"\x1b[32mINFO\x1b[0m one\n 10%\r 50%\r100%\npart")
    view.note("a note")
    view.close()
    view.close()
    view.output(b"ial\n")
    text = console.file.getvalue()
    assert "one" in text
    assert "100%" in text
    assert " 50%" not in text
    assert "a note" in text
    assert capfdbinary.readouterr().err == b"partial\n"


def test_a_lost_terminal_ends_the_display_and_nothing_else(progress, capsys):
    class Gone(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(5, "Input/output error")

    console = Console(
        file=io.TextIOWrapper(Gone(), write_through=True), width=80, force_terminal=True
    )
    plain = PlainView(Shown("", 0, output=True), Gone(), title=False)
    for view in (GuardedView(plain), GuardedView(_FailingView())):
        view.update(progress)
        view.output(b"x\n")
        view.note("x")
        view.close()
    with pytest.raises(OSError, match="Input/output"):
        LiveView(Shown("t", 0, output=True), console=console)
    assert capsys.readouterr().err.count("progress display failed") == 1


class _FailingView(PlainView):
    def __init__(self) -> None:
        super().__init__(Shown("", 0), io.BytesIO(), title=False)

    def update(self, progress: EngineProgress) -> None:
        raise KeyError("a bug")


@pytest.mark.parametrize("height", [8, 12, 20])
@pytest.mark.parametrize("width", [80, 120])
def test_the_full_screen_without_output_of_the_engine(progress, width, height):
    """Attach has none: nothing stands between the table and the foot."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, height=height, force_terminal=True, color_system=None
    )
    view = LiveView(Shown("title", 0, foot="Ctrl-C: leave"), screen=True, console=console)
    progress.serve([])
    view.update(progress)
    view.close()
    lines = [
        line.rstrip()
        for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    ]
    assert any(line.startswith("TP1") for line in lines)
    assert any(line.strip() == "Ctrl-C: leave" for line in lines)
    assert not any("Layout" in line or "╭" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_output_and_notes_on_the_full_screen(progress):
    stream = io.StringIO()
    console = Console(file=stream, width=120, height=30, force_terminal=True)
    view = LiveView(Shown("title", 0, output=True), screen=True, console=console)
    progress.output.append("INFO non-default args: {'port': 8000}")
    view.output(b"INFO api_key=Mk7QzSEEDx9\n")  # it shows what is redacted alone
    view.note("memprof: a note")
    view.update(progress)
    view.close()
    assert "non-default args" in stream.getvalue()
    assert "memprof: a note" in stream.getvalue()
    assert "Mk7QzSEEDx9" not in stream.getvalue()
