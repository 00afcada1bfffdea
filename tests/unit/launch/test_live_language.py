"""The views of a run under way in Chinese: no sentence stays English, no figure is lost."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.unit.launch.test_status import GIB, budgets, event, sample_core, served
from vllm_memprof.launch.live import LiveView, PlainView, Shown
from vllm_memprof.launch.painting import describe_serving, draw_ranks, draw_screen
from vllm_memprof.launch.progress import EngineProgress, GrowingOwner, RankBudget
from vllm_memprof.report.language import language
from vllm_memprof.text import text

ZH = language("zh")
NOW_NS = 61_000_000_000
#: Names of memprof's commands and of phases stay.
_ENGLISH = re.compile(r"[a-z]{3,} [a-z]{3,} ")


def growing() -> list[RankBudget]:
    grows = GrowingOwner("torch allocated", 40.0 * (1 << 20), 12.5)
    return [replace(budget, growth=(grows,)) for budget in budgets(5 * GIB, 4 * GIB)]


def states() -> dict[str, EngineProgress]:
    idle, busy, starting, in_phase = served(), served(), EngineProgress(), served()
    sample_core(busy, 40)
    busy.fold("core", event("lost", 41, events=3, until_t_ns=None, reason="ENOSPC"))
    starting.fold("f", event("process", 0, pid=1, role="api"))
    in_phase.fold("w0", event("phase", 50, phase="sleep", edge="before", id=7))
    return {"idle": idle, "busy": busy, "starting": starting, "in a phase": in_phase}


def drawn(painting: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(painting)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def paintings(progress: EngineProgress, lang: str, width: int) -> list[str]:
    say = language(lang)
    shown = Shown("memprof serve M", 0, sampled=True, modelled=True, say=say,
                  foot=text("Ctrl-C: end the server"), leave=text("q: leave the view"))  # fmt: skip
    console = Console(file=io.StringIO(), width=width, height=30)
    found = [drawn(draw_ranks(progress, shown, NOW_NS, width), width)]
    progress.serve(growing())
    lines = [
        describe_serving(progress, replace(shown, sampled=sampled), NOW_NS, room)
        for sampled in (True, False)
        for room in (None, width)
    ]
    for painting in (
        draw_ranks(progress, shown, NOW_NS, width),
        draw_screen(progress, shown, [], NOW_NS, console, True),
    ):
        found.append(drawn(painting, width))
    return lines + found


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("state", sorted(states()))
def test_views_in_chinese(state: str, width: int) -> None:
    english, chinese = (paintings(states()[state], lang, width) for lang in ("en", "zh"))
    for line, room in zip(chinese[:4], (None, width, None, width), strict=True):
        assert room is None or cell_len(line) <= room
    for said, translated in zip(english, chinese, strict=True):
        assert not _ENGLISH.search(translated.replace("memprof serve M", "")), translated
        assert said != translated
        if "\n" in said:
            assert max(cell_len(line) for line in translated.splitlines()) <= width
    for said, translated in zip(english[::2][:2], chinese[::2][:2], strict=True):  # any width
        assert sorted(re.findall(r"\d+", said)) == sorted(re.findall(r"\d+", translated))


def test_plain_lines_in_chinese() -> None:
    stream = io.BytesIO()
    progress = states()["busy"]
    shown = Shown("memprof serve M", 0, sampled=True, say=ZH, clock=lambda: NOW_NS)
    view = PlainView(shown, stream)
    progress.serve(growing())
    view.update(progress)
    lines = stream.getvalue().decode().splitlines()
    assert lines[0] == "memprof serve M"
    assert "TP0 warm_up reserved 50.00 GiB，峰值 -，非 torch -" in lines[1]
    assert lines[-1].startswith("   61.0s 2 个运行中，1 个等待中 | KV cache 已用 10.00 GiB")


def test_the_live_line_in_chinese() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    view = LiveView(Shown("memprof serve M", 0, sampled=True, say=ZH), console=console)
    progress = states()["busy"]
    progress.serve(growing())
    line = drawn(view._painting(progress, NOW_NS), 80)
    view.close()
    assert line.startswith("memprof 2 个运行中，1 个等待中")
    assert cell_len(line.rstrip("\n")) <= 80
