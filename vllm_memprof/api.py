"""The Python API: ``load`` gives figures of runs as DataFrames, ``plan`` and ``sweep`` make runs.

``import vllm_memprof as mp; run = mp.load("reports/x"); run.phases``. Importing the package loads
no pandas; the first table does. A plan is made by ``memprof plan`` in a process of its own, so that
its signals and its children are not those of the caller; ``memprof sweep`` makes its plans by
``make_sweep``, as ``sweep`` does.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_memprof.errors import LaunchError, MemprofError, RunRecordError, UsageError
from vllm_memprof.options import long_name, word_of, words_of
from vllm_memprof.sources import chosen, numbered, read_reports

if TYPE_CHECKING:
    import pandas as pd

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.frames.tables import RankSource
    from vllm_memprof.plans.model import Sweep
    from vllm_memprof.plans.runner import PlanRunner
    from vllm_memprof.plans.sweep import SweepJob


def _table(name: str, rows: str) -> cached_property[pd.DataFrame]:
    """Return a table of ``RunFrames``, which is made when it is first asked for."""

    def made(self: RunFrames) -> pd.DataFrame:
        from vllm_memprof.frames import tables

        of_table: Callable[[object], pd.DataFrame] = getattr(tables, name)
        return of_table(self.reports if name == "findings" else self._ranks)

    made.__doc__ = f"{rows}; columns in ``frames.tables.{name}``."
    return cached_property(made)


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

    phases = _table("phases", "One row per rank and passage through a phase")
    snapshots = _table("snapshots", "One row per rank, phase and edge")
    host_memory = _table("host_memory", "One row per rank and owner of host memory")
    device_memory = _table("device_memory", "One row per rank, phase, edge and owner")
    budget = _table("budget", "One row per rank and figure of its equation")
    weights = _table("weights", "One row per rank, class and dtype of its weights")
    audit = _table("audit", "One row per rank and audited figure")
    kv = _table("kv", "One row per rank, its KV cache")
    empty_cache = _table("empty_cache", "One row per rank and call")
    requests = _table("requests", "One row per rank and request")
    connectors = _table("connectors", "One row per rank and thing that KV connectors take")
    growth = _table("growth", "One row per rank and owner while it served")
    samples = _table("samples", "One row per rank, stretch of time and figure")
    findings = _table("findings", "One row per finding, the gravest first")

    def to_html(self) -> str:
        """Return the self-contained page of ``memprof report --format html``."""
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
            then ``plans.documents.CSV_COLUMNS`` (docs/concepts/plans.md). Bytes and tokens are
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
            raise RunRecordError(f"{path} is not the csv of a sweep", hint)
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

    A folder that holds run folders, or a glob of them, is one deployment on several hosts.

    Args:
        path: its path. A log with several engine starts gives all of them; ``LOG#2`` gives the
            second alone.

    Raises:
        RunRecordError: it cannot be read, or is none of these.
        UsageError: the folders are of several deployments.
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
            raise RunRecordError(f"{path} is a sweep, not a run", hint)
        reports += found.reports
    return RunFrames(reports)


def plan(
    model: str,
    *,
    engine: str = "vllm",
    device: str = "auto",
    run_dir: str | Path | None = None,
    timeout_s: float = 600.0,
    python: str | None = None,
    stack: str | None = None,
    ranks: str | None = None,
    rank: int | None = None,
    until: str | None = None,
    **options: object,
) -> RunFrames:
    """Make one plan, as ``memprof plan`` does, and return its figures.

    Args:
        model: folder or hub name, as for the engine.
        engine, device, python, stack, ranks, rank, until: the options of ``memprof plan``.
        run_dir: where to record; default ``reports/<time>-<model>``.
        timeout_s: until the engine must have planned.
        options: arguments of the engine by their names: ``tensor_parallel_size=4`` is
            ``--tensor-parallel-size=4``, True and False switch an option, None leaves it out.

    Returns:
        The run. One that failed or ran out of memory is returned too: ``reports`` say how it ended.

    Raises:
        LaunchError: it left nothing that can be read, with the reason.
    """
    from vllm_memprof.launch.folder import default_run_dir, other_names
    from vllm_memprof.plans.model import Plan
    from vllm_memprof.plans.runner import run_plan

    own = {
        "engine": engine, "device": device, "python": python, "stack": stack, "ranks": ranks,
        "rank": rank, "until": until,
    }  # fmt: skip
    asked = Plan.asked(model, words_of(options), own, timeout_s)
    folder = default_run_dir(model) if run_dir is None else Path(run_dir).expanduser()
    folder = folder.absolute()
    if run_dir is None and folder.exists():
        folder = next(path for path in other_names(folder) if not path.exists())
    elif folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"run folder {folder} is not empty", "give a new folder, or none")
    folder.parent.mkdir(parents=True, exist_ok=True)
    row = run_plan(asked, folder)
    try:
        return RunFrames(read_reports(str(folder)))
    except MemprofError as error:
        reason = row.reason or error.message
        raise LaunchError(f"no plan of {model}: {reason}", str(folder)) from error


def sweep(
    model: str,
    over: Mapping[str, Sequence[object]],
    *,
    engine: str = "vllm",
    device: str = "auto",
    folder: str | Path | None = None,
    jobs: int | None = None,
    timeout_s: float = 600.0,
    python: str | None = None,
    stack: str | None = None,
    ranks: str | None = None,
    cache: bool = True,
    **options: object,
) -> SweepFrames:
    """Plan every combination of some options' values, as ``memprof sweep`` does.

    To be called in the main thread, as it takes Ctrl-C while plans are under way.

    Args:
        model: folder or hub name, as for the engine.
        over: option of the engine -> its values: ``{"tensor_parallel_size": [2, 4]}``; ``device``
            and ``stack`` can be varied too.
        engine, device, python, stack, ranks: the options of ``memprof sweep``.
        folder: of the sweep; default ``reports/sweep-<model>-<digest>``. Of a folder that is there
            the plans that are missing are made.
        jobs: plans at a time; default: by cores and free memory.
        timeout_s: until the engine of a plan must have planned.
        cache: read and write the cache of plans.
        options: arguments of the engine, as of ``plan``.

    Returns:
        A row per plan, also of one that failed, with the reason.

    Raises:
        UsageError: an option without values, or a folder of something else.
        KeyboardInterrupt: Ctrl-C; the plans that are made are kept.
    """
    from vllm_memprof.plans.model import Knob, Plan
    from vllm_memprof.plans.runner import Interrupted, PlanRunner, default_jobs, run_here
    from vllm_memprof.plans.store import Store
    from vllm_memprof.plans.sweep import SweepJob, default_folder

    if jobs is not None and jobs < 1:
        raise UsageError("jobs must be at least 1")
    knobs = [Knob(long_name(name)[2:], [word_of(value) for value in over[name]]) for name in over]
    if not knobs or not all(knob.values for knob in knobs):
        raise UsageError("over has no option with a value")
    own = {"engine": engine, "device": device, "python": python, "stack": stack, "ranks": ranks}
    asked = Plan.asked(model, words_of(options), own, timeout_s)
    place = default_folder(asked, knobs) if folder is None else Path(folder).expanduser()
    command = ["mp.sweep", model, *(f"{knob.name}={','.join(knob.values)}" for knob in knobs)]
    job = SweepJob(asked, knobs, command)
    at_once = jobs or default_jobs(job.plans)
    runner = PlanRunner(
        place.absolute(), store=Store() if cache else None,
        pool=lambda tasks, progress: run_here(tasks, progress, at_once),
    )  # fmt: skip
    try:
        make_sweep(job, runner)
    except Interrupted:
        raise KeyboardInterrupt from None
    return SweepFrames(runner.folder / "sweep.csv")


def make_sweep(job: SweepJob, runner: PlanRunner, lang: str = "en") -> tuple[Sweep, list[str]]:
    """Make the plans of a sweep that are not there yet, and write its files.

    Args:
        job: the sweep.
        runner: makes its plans.
        lang: of the page.

    Returns:
        The sweep, and the names of the files in its folder.

    Raises:
        UsageError: the folder holds something else, or another memprof is at it.
        Interrupted: by a signal; the files hold what is there so far.
    """
    from vllm_memprof.files import write_atomically
    from vllm_memprof.plans.documents import render_sweep_csv, sweep_document
    from vllm_memprof.plans.runner import Interrupted
    from vllm_memprof.plans.sweep import run_sweep
    from vllm_memprof.report.html import render_html
    from vllm_memprof.report.json_text import render_result_json

    def write(found: Sweep) -> list[str]:
        page = render_html(partial(sweep_document, found), lang=lang)
        made = {"csv": render_sweep_csv(found), "json": render_result_json(found), "html": page}
        for suffix, content in made.items():
            write_atomically(runner.folder / f"sweep.{suffix}", content)
        return [f"sweep.{suffix}" for suffix in made]

    try:
        found = run_sweep(job, runner)
    except Interrupted as error:
        if error.sweep is not None:
            write(error.sweep)
        raise
    return found, write(found)
