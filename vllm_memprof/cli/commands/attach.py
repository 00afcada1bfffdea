"""``memprof attach``: shows a run that another process records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.cli import live
from vllm_memprof.cli.show import check_format, command_app
from vllm_memprof.text import text


def attach(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    once: Annotated[bool, typer.Option("--once", help="Print one reading and exit.")] = False,
    screen: live.Screen = False,
    lang: live.ViewLang = "en",
) -> None:
    """Show a run that another process records.

    Reads the run folder and changes nothing in it. Ctrl-C leaves the view; the run goes on. Where
    stdout is no terminal, and with --once, it prints plain text.
    """
    from vllm_memprof.cli.plans import can_repaint
    from vllm_memprof.launch.attach import Attached
    from vllm_memprof.launch.live import GuardedView, LiveView, PlainView

    check_format("table", printed=True, lang=lang)
    attached = Attached(run, lambda: live.read_budgets(run))
    shown = live.shown_by_attach(attached, lang)
    end = attached.ended()
    if once or end is not None:
        sys.stdout.write(live.describe(attached, shown))
        return
    view: PlainView | LiveView
    if can_repaint() and sys.stdout.isatty():
        view = LiveView(shown, screen, table=True)
    else:
        view = PlainView(shown, stream=sys.stdout.buffer)
    views = GuardedView(view, *live.refresher(run, [view], shown.sampled))
    try:
        end = attached.follow(views, lambda: isinstance(view, LiveView) and view.left)
    except KeyboardInterrupt:
        end = None
    finally:
        views.close()
    if isinstance(view, LiveView):
        sys.stdout.write(live.describe(attached, shown))
    else:
        view.note(f"memprof: {shown.say(end or text('left; the run goes on'))}")


app = command_app(attach)
