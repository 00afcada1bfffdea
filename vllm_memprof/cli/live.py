"""Shared by commands that show a run while it is recorded: their options, and what views need."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_memprof.errors import UsageError
from vllm_memprof.text import text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.launch.attach import Attached
    from vllm_memprof.launch.live import Shown, View
    from vllm_memprof.launch.metrics import Exporter
    from vllm_memprof.launch.refresh import Refresher
    from vllm_memprof.launch.status import RankBudget

#: Address that --metrics-port listens on where none is given.
METRICS_HOST = "127.0.0.1"


def open_exporter(host: str, port: int | None, modelled: bool) -> Exporter | None:
    """Listen for scrapes where a port was given.

    Args:
        host, port: where to; no port, no exporter.
        modelled: the device is simulated.

    Raises:
        UsageError: an address without a port, or one that cannot be listened on.
        MemprofError: prometheus_client is not installed.
    """
    if port is None:
        if host != METRICS_HOST:
            raise UsageError("--metrics-host goes with --metrics-port", hint="--metrics-port 9400")
        return None
    from vllm_memprof.launch.metrics import Exporter

    return Exporter(host, port, modelled)


def read_budgets(run_dir: Path) -> list[RankBudget]:
    """Return what accounting says of the ranks of a run so far; none where it cannot be read."""
    from vllm_memprof.errors import MemprofError
    from vllm_memprof.sources import build_run

    try:
        return rank_budgets(build_run(run_dir))
    except MemprofError:
        return []


def rank_budgets(report: Report) -> list[RankBudget]:
    """Return the figures of a report that the views and the metrics show."""
    from vllm_memprof.accounting.serving.trend import GROWING, TOO_SHORT
    from vllm_memprof.launch.status import GrowingOwner, RankBudget
    from vllm_memprof.record.spans import UNEXPLAINED, edges_of

    found = []
    for rank in report.ranks:
        budget = rank.budget
        divided = [
            (edge.snapshot.t_ns or 0, edge.owners)
            for _, edge in edges_of(rank.phases)
            if edge.owners is not None and edge.owners.unexplained_bytes is not None
        ]
        owners: dict[str, int] = {}
        if divided:
            _, last = max(divided, key=lambda pair: pair[0])
            owners = {
                row.component: row.bytes
                for row in last.rows
                if row.bytes is not None and row.part_of is None
            }
            owners[UNEXPLAINED] = last.unexplained_bytes or 0
        judged = [row for row in rank.growth if row.verdict != TOO_SHORT and not row.bounded]
        growth = tuple(
            GrowingOwner(row.owner, row.bytes_per_hour, row.bytes_per_request, row.hours_until_full)
            for row in judged
            if row.verdict == GROWING
        )
        found.append(
            RankBudget(
                label=rank.label,
                pid=rank.pid,
                granted_bytes=budget.engine_kv_cache_bytes,
                fits_request_bytes=budget.fits_request_bytes,
                fits_device_bytes=budget.fits_device_bytes,
                headroom_bytes=budget.headroom_bytes,
                owners=owners,
                growth=growth if judged else None,  # None: no owner could be judged
            )
        )
    return found


def refresher(run_dir: Path, views: Iterable[View], sampled: bool) -> list[Refresher]:
    """Return what gives views newer figures; nothing of a run that is not sampled has any."""
    if not sampled:
        return []
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.launch.refresh import Refresher
    from vllm_memprof.record.codec import from_json

    def read(printed: bytes) -> list[RankBudget]:
        return rank_budgets(from_json(Report, json.loads(printed)))

    command = [sys.executable, "-m", "vllm_memprof", "report", str(run_dir), "--format", "json"]
    return [Refresher(command, read, views)]


def shown_by_attach(attached: Attached, lang: str) -> Shown:
    """Return what the views of ``memprof attach`` have to know of a run."""
    from vllm_memprof.launch.live import Shown
    from vllm_memprof.report.language import language

    info = attached.info
    return Shown(
        f"memprof attach {info.mode} {info.model}",
        info.start_t_ns or attached.clock(),
        sampled=info.sample is not None,
        modelled=info.simulated,
        foot=text("Ctrl-C: leave the view, the run goes on"),
        leave=text("q: leave the view"),
        clock=attached.clock,
        say=language(lang),
    )


def describe(attached: Attached, shown: Shown) -> str:
    """Return one reading of a run that is followed, and how it ended, as text."""
    from vllm_memprof.cli.show import file_width, printed
    from vllm_memprof.launch.live import render_progress, serving_table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else file_width()
    now_ns = attached.clock()
    if attached.budgets is None:
        drawn = render_progress(attached.progress, shown, now_ns, width)
    else:
        drawn = serving_table(attached.progress, attached.budgets, shown, now_ns, width)
    end = attached.ended()
    return printed(drawn) + ("" if end is None else f"memprof: {shown.say(end)}\n")
