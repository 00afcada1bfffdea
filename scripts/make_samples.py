"""Writes a sample of each report format below ``reports/``, from recorded runs: ``make samples``.

The screenshots need a Chromium or Chrome; without one they stay as they are, and the script says
so.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import BrowserType, sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

from vllm_memprof.accounting.model import Report
from vllm_memprof.cli.live import rank_budgets, shown_of
from vllm_memprof.cli.show import pieces
from vllm_memprof.launch.attach import Attached
from vllm_memprof.launch.painting import draw_screen
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.html import render_html
from vllm_memprof.report.table import render_table
from vllm_memprof.sources import build_run
from vllm_memprof.text import text

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TARGET = ROOT / "reports"
RUN, OOM_RUN, SERVING_RUN = "recorded_023_tp2", "recorded_oom", "serving/tp2"
#: 60 images through Qwen3-VL-8B; out of memory at the first of 4096x4096.
IMAGES_RUN = "serving/sixty_images"
LIVE_LINES = 14


@dataclass(frozen=True)
class Sample:
    """A committed file and what it is made of."""

    file: str
    run: str  # folder of tests/data
    write: Callable[[Report], str]


def formatted(format_name: str, lang: str = "en") -> Callable[[Report], str]:
    """What ``memprof report --format`` writes into a file."""
    return lambda report: "".join(pieces([report], format_name, to_file=True, lang=lang))


#: One row per format and language.
SAMPLES = (
    Sample("sample.txt", RUN, formatted("table")),
    Sample("sample.md", RUN, formatted("markdown")),
    Sample("sample.zh.md", RUN, formatted("markdown", "zh")),
    Sample("sample.html", RUN, formatted("html")),
    Sample("sample.json", RUN, formatted("json")),
    Sample("sample.csv", RUN, formatted("csv")),
    Sample("sample.trace.json", RUN, formatted("trace")),
)


def terminal(ground: str, ink: str) -> str:
    """A terminal's window around what rich printed."""
    return f"""<!DOCTYPE html><meta charset="utf-8"><style>
body {{{{ margin: 0; background: {ground} }}}}
pre {{{{ margin: 0; padding: 16px 20px; color: {ink} }}}}
pre {{{{ font: 13px/1.3 "DejaVu Sans Mono", monospace }}}}
</style><pre>{{code}}</pre>"""


TERMINAL = terminal("#16181d", "#d6dae1")
LIGHT_TERMINAL = terminal("#ffffff", "#24292f")
TERMINAL_COLUMNS = 110


def terminal_page(report: Report) -> str:
    """What ``memprof report`` prints on a terminal of dark ground, as a page."""
    console = Console(
        record=True, file=io.StringIO(), width=TERMINAL_COLUMNS, force_terminal=True, _environ={}
    )
    folder = f"reports/{report.run.model.split('/')[-1].lower()}"
    console.print(f"[bold]$[/bold] memprof report {folder}", highlight=False)
    console.print(render_table(FirstScreen((report,), folder)))
    return console.export_html(theme=MONOKAI, code_format=TERMINAL, inline_styles=True)


def live_page(columns: int, dark: bool) -> Callable[[Report], str]:
    """What ``memprof attach --live`` shows of the run that was copied while it served."""

    def draw(report: Report) -> str:
        folder = DATA / SERVING_RUN
        attached = Attached(folder, lambda: rank_budgets(report))
        console = Console(
            record=True, file=io.StringIO(), width=columns, height=LIVE_LINES,
            force_terminal=True, _environ={},
        )  # fmt: skip
        info = attached.info
        shown = shown_of(info, f"attach {info.mode}", info.start_t_ns or 0, "en",
                         foot=text("Ctrl-C: leave the view, the run goes on"),
                         leave=text("q: leave the view"))  # fmt: skip
        console.print(
            draw_screen(attached.progress, shown, [], attached.clock(), console, keys=True)
        )
        theme, page = (MONOKAI, TERMINAL) if dark else (DEFAULT_TERMINAL_THEME, LIGHT_TERMINAL)
        return console.export_html(theme=theme, code_format=page, inline_styles=True)

    return draw


@dataclass(frozen=True)
class Screenshot:
    """A picture of a run, as a reader first sees it."""

    file: str
    run: str
    width: int  # CSS pixels
    height: int
    draw: Callable[[Report], str] = render_html
    dark: bool = False
    scroll_to: str = "html"


SCREENSHOTS = (
    Screenshot("terminal.png", RUN, 910, 700, terminal_page),
    Screenshot("terminal-oom.png", OOM_RUN, 910, 606, terminal_page),
    Screenshot("live-80-dark.png", SERVING_RUN, 672, 270, live_page(80, dark=True)),
    Screenshot("live-80-light.png", SERVING_RUN, 672, 270, live_page(80, dark=False)),
    Screenshot("live-120-dark.png", SERVING_RUN, 985, 270, live_page(120, dark=True)),
    Screenshot("live-120-light.png", SERVING_RUN, 985, 270, live_page(120, dark=False)),
    Screenshot("page-1280.png", RUN, 1280, 940),
    Screenshot("images-1280.png", IMAGES_RUN, 1280, 1800, scroll_to="section.plots"),
    Screenshot("images-800-dark.png", IMAGES_RUN, 800, 1800, dark=True, scroll_to="section.plots"),
    Screenshot("page-390-dark.png", RUN, 390, 1500, dark=True),
)


def main() -> int:
    TARGET.mkdir(exist_ok=True)
    for sample in SAMPLES:
        path = TARGET / sample.file
        path.write_text(sample.write(build_run(DATA / sample.run)), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        print(
            "no Chromium or Chrome on this machine: the screenshots stay as they are",
            file=sys.stderr,
        )
        return 0
    with sync_playwright() as playwright:
        for shot in SCREENSHOTS:
            take(shot, playwright.chromium, program)
    return 0


def take(shot: Screenshot, chromium: BrowserType, program: str) -> None:
    """Take one picture, in a browser of its own; what the page complains of ends the script."""
    browser = chromium.launch(executable_path=program, chromium_sandbox=False)
    page = browser.new_page(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme="dark" if shot.dark else "light",
    )
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(shot.draw(build_run(DATA / shot.run)), encoding="utf-8")
        page.goto(file.as_uri())
    of = f"document.querySelector({shot.scroll_to!r})"
    if shot.scroll_to != "html":
        page.evaluate(f"{of}.querySelectorAll('.part > details').forEach(part => part.open = true)")
        page.wait_for_timeout(1000)  # until it is drawn
    page.evaluate(f"{of}.scrollIntoView()")
    page.wait_for_timeout(300)
    path = TARGET / shot.file
    page.screenshot(path=path)
    browser.close()
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    if complaints:
        raise SystemExit(f"{shot.file}: {complaints}")


if __name__ == "__main__":
    sys.exit(main())
