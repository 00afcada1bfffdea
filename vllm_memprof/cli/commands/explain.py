"""``memprof explain``: the report of a run from nothing but its log."""

from __future__ import annotations

import sys

import typer

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.cli.options import REPORTS, command_app
from vllm_memprof.cli.show import say, write_reports
from vllm_memprof.errors import RunRecordError
from vllm_memprof.logs.memory_files import beside
from vllm_memprof.logs.to_record import LOOKED_FOR, NoMemoryLines, read_log
from vllm_memprof.sources import chosen, numbered


def explain(ctx: typer.Context, logs: list[str], **shown: object) -> None:
    """Print what a log or a memory file tells: what failed and why, or what fits.

    Reads logs of every engine that memprof runs, of any version, out-of-memory messages of torch
    and torch_npu, and npu-smi tables, as printed or as pasted into an issue; plain or packed with
    gzip, bzip2, xz, zstandard or zip. Each file of an archive is a log. Values are exact to their
    last printed digit. Secrets are replaced by *** first.

    Memory files, alone or beside the log (report: the run): snapshots of torch and torch_npu
    (_dump_snapshot), torch_npu's memUsageInfo csv, npu_module_mem, memory_record and
    operator_memory csv of msprof and torch_npu, msMemScope's csv and db.

    Of several starts, the first screen has a table, and the last of them; json is an array of them,
    html and csv are one file. LOG#2 is only the second start of a log.

    Exit status 0: at least one log has a value or a failure. 3: none has, or one cannot be read.
    """
    if ctx.params["prove"]:
        from vllm_memprof.cli.plans import write_proved as write
    else:
        write = write_reports
    write(ctx, read_reports(logs), logs)


def read_reports(logs: list[str]) -> list[Report]:
    """Return one report per engine start, log by log; name those without either on stderr.

    Raises:
        RunRecordError: none of the logs holds a line about memory, one cannot be read, or has no
            start of that number.
    """
    runs, empty = [], []
    for name in logs:
        path, number = numbered(name)
        if path == "-" and sys.stdin.isatty():
            say("paste a log, then end it with Ctrl-D on a line of its own")
        try:
            runs += chosen(path, number, read_log(path))
        except NoMemoryLines as error:
            empty.append(error)
    if not runs and len(empty) > 1:
        raise RunRecordError(
            f"no line about memory in any of {len(empty)} logs; looked for {LOOKED_FOR}",
            hint=empty[0].hint,
        )
    if not runs:
        raise empty[0]
    for blank in empty:
        say(f"{blank.message}")
    return [build_report(run) for run in beside(runs)]


app = command_app(explain, REPORTS)
