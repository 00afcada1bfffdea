"""``memprof attach``: shows a run that another process records."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from pathlib import Path

import typer

from vllm_memprof.cli import live
from vllm_memprof.cli.options import command_app
from vllm_memprof.cli.show import can_repaint, find_run, write_reports
from vllm_memprof.errors import MemprofError
from vllm_memprof.launch.attach import Attached
from vllm_memprof.launch.live import GuardedView, LiveView, PlainView
from vllm_memprof.sources import build_run
from vllm_memprof.text import text


def attach(
    ctx: typer.Context,
    run: str | None = None,
    once: bool = False,
    screen: bool = False,
    lang: str = "en",
) -> None:
    """Show a run that another process records.

    Reads the run folder and changes nothing in it. Ctrl-C leaves the view; the run goes on. Where
    stdout is no terminal, and with --once, it prints plain text.
    """
    folder = Path(find_run(run))
    attached = Attached(folder, lambda: live.read_budgets(folder))
    info = attached.info
    shown = live.shown_of(
        info,
        f"attach {info.mode}",
        info.start_t_ns or attached.clock(),
        lang,
        foot=text("Ctrl-C: leave the view, the run goes on"),
        leave=text("q: leave the view"),
        clock=attached.clock,
    )
    end, view = attached.ended(), PlainView(shown, sys.stdout.buffer, title=False)
    if end is None and not once:
        if can_repaint() and sys.stdout.isatty():
            view = LiveView(shown, screen, table=True)
        else:
            view.note(shown.title)
        views = GuardedView(view, *live.refresher(folder, shown.sampled))
        with suppress(KeyboardInterrupt), closing(views):
            end = attached.follow(views, lambda: view.left)
        if end is None and not isinstance(view, LiveView):
            view.note(f"memprof: {shown.say(text('left; the run goes on'))}")
            return
    if end is not None:
        with suppress(MemprofError):  # else it is shown as far as it is known
            write_reports(ctx, [build_run(folder)], [str(folder)])
            sys.stdout.write(f"memprof: {shown.say(end)}\n")
            return
    sys.stdout.write(live.describe(attached, shown))


app = command_app(attach)
