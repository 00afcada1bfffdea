"""The Python API: ``load`` and ``load_many`` give the figures of runs as DataFrames.

``import vllm_memprof as mp; run = mp.load("reports/x"); run.phases``. Importing the package loads
no pandas; the first table does.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_memprof.errors import RunRecordError
from vllm_memprof.sources import chosen, numbered, read_reports

if TYPE_CHECKING:
    import pandas as pd

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.frames.tables import RankSource


class RunFrames:
    """The figures of one or several runs, one DataFrame per table, made when it is first asked for.

    Every table has the column ``run``, so that those of several runs can be told apart.

    Attributes:
        reports: the reports behind the tables, in the order of the rows.
    """

    def __init__(self, reports: Iterable[Report]) -> None:
        self.reports = list(reports)

    @cached_property
    def _ranks(self) -> list[RankSource]:
        from vllm_memprof.frames.tables import rank_sources

        return rank_sources(self.reports)

    @cached_property
    def phases(self) -> pd.DataFrame:
        """One row per rank and passage through a phase; columns in ``frames.tables.phases``."""
        from vllm_memprof.frames import tables

        return tables.phases(self._ranks)

    @cached_property
    def snapshots(self) -> pd.DataFrame:
        """One row per rank, phase and edge; columns in ``frames.tables.snapshots``."""
        from vllm_memprof.frames import tables

        return tables.snapshots(self._ranks)

    @cached_property
    def device_memory(self) -> pd.DataFrame:
        """One row per rank, phase, edge and owner; columns in ``frames.tables.device_memory``."""
        from vllm_memprof.frames import tables

        return tables.device_memory(self._ranks)

    @cached_property
    def budget(self) -> pd.DataFrame:
        """One row per rank and figure of its equation; columns in ``frames.tables.budget``."""
        from vllm_memprof.frames import tables

        return tables.budget(self._ranks)

    @cached_property
    def audit(self) -> pd.DataFrame:
        """One row per rank and audited figure; columns in ``frames.tables.audit``."""
        from vllm_memprof.frames import tables

        return tables.audit(self._ranks)

    @cached_property
    def kv(self) -> pd.DataFrame:
        """One row per rank, its KV cache; columns in ``frames.tables.kv``."""
        from vllm_memprof.frames import tables

        return tables.kv(self._ranks)

    @cached_property
    def empty_cache(self) -> pd.DataFrame:
        """One row per rank and call; columns in ``frames.tables.empty_cache``."""
        from vllm_memprof.frames import tables

        return tables.empty_cache(self._ranks)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per rank and request; columns in ``frames.tables.requests``."""
        from vllm_memprof.frames import tables

        return tables.requests(self._ranks)

    @cached_property
    def growth(self) -> pd.DataFrame:
        """One row per rank and owner while it served; columns in ``frames.tables.growth``."""
        from vllm_memprof.frames import tables

        return tables.growth(self._ranks)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per rank, stretch of time and figure; columns in ``frames.tables.samples``."""
        from vllm_memprof.frames import tables

        return tables.samples(self._ranks)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """One row per finding, the gravest first; columns in ``frames.tables.findings``."""
        from vllm_memprof.frames import tables

        return tables.findings(self.reports)

    def to_html(self) -> str:
        """Return the self-contained page of ``memprof report --format html``.

        Raises:
            MemprofError: jinja2 or plotly is not installed.
        """
        from vllm_memprof.report.html import render_html

        return render_html(*self.reports)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: per run its verdict, then KV caches and findings."""
        from vllm_memprof.report.documents.report import verdict

        lines = [
            f"<p><b>{html.escape(report.run.model)}</b>: {html.escape(verdict(report))}</p>"
            for report in self.reports
        ]
        tables = [frame.to_html(index=False) for frame in (self.kv, self.findings) if len(frame)]
        return "\n".join([*lines, *tables])

    def __repr__(self) -> str:
        runs = ", ".join(report.run.id or report.run.model for report in self.reports)
        return f"<RunFrames of {runs}>"


class SweepFrames:
    """The plans of a sweep.

    Attributes:
        plans: one row per plan, in the order of ``sweep.csv``: a column per option that was varied,
            then those of ``report.results.COLUMNS`` (docs/concepts/plans.md). Bytes and tokens are
            ``Int64``, concurrency and seconds ``Float64``, words ``string``.
    """

    def __init__(self, path: Path) -> None:
        import pandas as pd

        try:
            frame = pd.read_csv(path, dtype_backend="numpy_nullable")
        except (OSError, ValueError) as exc:
            raise RunRecordError(f"cannot read {path}: {exc}") from exc
        if not {"status", "kv_cache_bytes"} <= set(frame.columns):
            hint = "give the sweep.csv of memprof sweep"
            raise RunRecordError(f"{path} is not the csv of a sweep", hint=hint)
        whole = [name for name in frame.columns if name.endswith("_bytes") or name == "tokens"]
        self.plans = frame.astype(dict.fromkeys(whole, "Int64"))
        self._path = path

    def _repr_html_(self) -> str:
        html_text: str = self.plans.to_html(index=False)
        return html_text

    def __repr__(self) -> str:
        return f"<SweepFrames of {self._path}: {len(self.plans)} plans>"


def load(path: str | Path) -> RunFrames | SweepFrames:
    """Load a run folder, a ``report.json``, a log, or the ``sweep.csv`` of a sweep.

    Args:
        path: its path. A log with several engine starts gives all of them; ``LOG#2`` gives the
            second alone.

    Raises:
        RunRecordError: it cannot be read, or is none of these.
    """
    name, number = numbered(str(path))
    if name.endswith(".csv"):
        return SweepFrames(Path(name))
    return RunFrames(chosen(name, number, read_reports(name)))


def load_many(paths: Iterable[str | Path]) -> RunFrames:
    """Load several runs into common tables; the column ``run`` tells them apart.

    Raises:
        RunRecordError: one of them cannot be read, or is a sweep.
    """
    reports: list[Report] = []
    for path in paths:
        found = load(path)
        if not isinstance(found, RunFrames):
            hint = "give runs; load() reads a sweep"
            raise RunRecordError(f"{path} is a sweep, not a run", hint=hint)
        reports += found.reports
    return RunFrames(reports)
