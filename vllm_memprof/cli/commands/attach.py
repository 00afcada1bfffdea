"""``memprof attach``: shows a run that another process records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli import live
from vllm_memprof.cli.runs import Run, find_run
from vllm_memprof.cli.show import can_repaint, check_format, command_app, render
from vllm_memprof.cli.show import shown as screens
from vllm_memprof.text import text

if TYPE_CHECKING:
    from vllm_memprof.launch.attach import Attached
    from vllm_memprof.launch.live import Shown


def attach(
    run: Run = None,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and exit.")] = False,
    screen: live.Screen = False,
    lang: live.ViewLang = "en",
) -> None:
    """Show a run that another process records.

    Reads the run folder and changes nothing in it. Ctrl-C leaves the view; the run goes on. Where
    stdout is no terminal, and with --once, it prints plain text.
    """
    from vllm_memprof.launch.attach import Attached
    from vllm_memprof.launch.live import GuardedView, LiveView, PlainView

    check_format("table", printed=True, lang=lang)
    folder = Path(find_run(run))
    attached = Attached(folder, lambda: live.read_budgets(folder))
    shown = live.shown_by_attach(attached, lang)
    end = attached.ended()
    if end is not None:
        _say_the_end(folder, attached, shown, lang)
        return
    if once:
        sys.stdout.write(live.describe(attached, shown))
        return
    view: PlainView | LiveView
    if can_repaint() and sys.stdout.isatty():
        view = LiveView(shown, screen, table=True)
    else:
        view = PlainView(shown, stream=sys.stdout.buffer)
    views = GuardedView(view, *live.refresher(folder, [view], shown.sampled))
    try:
        end = attached.follow(views, lambda: isinstance(view, LiveView) and view.left)
    except KeyboardInterrupt:
        end = None
    finally:
        views.close()
    if end is not None:
        _say_the_end(folder, attached, shown, lang)
    elif isinstance(view, LiveView):
        sys.stdout.write(live.describe(attached, shown))
    else:
        view.note(f"memprof: {shown.say(text('left; the run goes on'))}")


def _say_the_end(run: Path, attached: Attached, shown: Shown, lang: str) -> None:
    """Print the first screen of a run that has ended; one that cannot be read, as it is known."""
    from vllm_memprof.errors import MemprofError
    from vllm_memprof.sources import build_run

    try:
        report = build_run(run)
        found = screens([report], str(run))
        sys.stdout.write(render(report, "table", lang=lang, found=found))
        sys.stdout.write(f"memprof: {shown.say(attached.ended() or '')}\n")
    except MemprofError:
        sys.stdout.write(live.describe(attached, shown))


app = command_app(attach)
