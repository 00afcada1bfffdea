"""Shared by commands that show a run while it is recorded: what its views need."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.launch.painting import Shown, draw_ranks
from vllm_memprof.launch.progress import GrowingOwner, RankBudget
from vllm_memprof.launch.refresh import Refresher

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.launch.attach import Attached
    from vllm_memprof.launch.metrics import Exporter
    from vllm_memprof.record.schema import RunInfo

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
    from vllm_memprof.sources import build_run

    try:
        return rank_budgets(build_run(run_dir))
    except MemprofError:
        return []


def rank_budgets(report: Report) -> list[RankBudget]:
    """Return the figures of a report that the views and the metrics show."""
    from vllm_memprof.accounting.serving.trend import TOO_SHORT
    from vllm_memprof.record.spans import UNEXPLAINED, edges_of

    found = []
    for rank in report.ranks:
        budget, owners = rank.budget, dict[str, int]()
        edges = sorted(
            (edge for _, edge in edges_of(rank.phases)), key=lambda edge: edge.snapshot.t_ns or 0
        )
        for edge in edges:
            if edge.owners is not None and edge.owners.unexplained_bytes is not None:
                rows = [row for row in edge.owners.rows if row.part_of is None]
                owners = {row.component: row.bytes for row in rows if row.bytes is not None}
                owners[UNEXPLAINED] = edge.owners.unexplained_bytes
        judged = [row for row in rank.growth if row.verdict != TOO_SHORT and not row.bounded]
        growth = tuple(
            GrowingOwner(row.owner, row.bytes_per_hour, row.hours_until_full)
            for row in judged
            if row.grows
        )
        found.append(
            RankBudget(
                rank.label,
                rank.pid,
                budget.engine_kv_cache_bytes,
                budget.fits_request_bytes,
                budget.fits_device_bytes,
                budget.headroom_bytes,
                owners,
                growth if judged else None,  # None: no owner could be judged
                {row.owner: row.bytes for row in rank.host_memory.rows},
                rank.kv.usable_tokens,
            )
        )
    return found


def refresher(run_dir: Path, sampled: bool) -> list[Refresher]:
    """Return what gets newer figures; nothing of a run that is not sampled has any."""

    def read(printed: bytes) -> list[RankBudget]:
        from vllm_memprof.accounting.model import Report
        from vllm_memprof.record.codec import from_json

        return rank_budgets(from_json(Report, json.loads(printed)))

    command = [sys.executable, "-m", "vllm_memprof", "report", str(run_dir), "--format", "json"]
    return [Refresher(command, read)] if sampled else []


def shown_of(info: RunInfo, command: str, start_ns: int, lang: str, **own: Any) -> Shown:
    """Return what views have to know of a run.

    Args:
        info: of the run.
        command: that shows it.
        start_ns: CLOCK_MONOTONIC at launch.
        lang: of the user.
        own: further fields.
    """
    from vllm_memprof.report.language import language

    return Shown(
        f"memprof {command} {info.model}",
        start_ns,
        sampled=info.sample is not None,
        modelled=info.simulated,
        say=language(lang),
        **own,
    )


def describe(attached: Attached, shown: Shown) -> str:
    """Return one reading of a run that is followed, and how it ended, as text."""
    from vllm_memprof.cli.show import file_width, printed

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else file_width()
    end = attached.ended()
    drawn = printed(draw_ranks(attached.progress, shown, attached.clock(), width))
    return drawn + ("" if end is None else f"memprof: {shown.say(end)}\n")
