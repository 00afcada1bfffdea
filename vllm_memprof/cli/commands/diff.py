"""``memprof diff``: why two runs have another KV cache, term by term."""

from __future__ import annotations

import typer

from vllm_memprof.cli.options import OUTPUT, command_app
from vllm_memprof.cli.show import find_run, run_before, write_result
from vllm_memprof.compare.diff import diff_reports
from vllm_memprof.compare.document import diff_document
from vllm_memprof.sources import read_report


def diff(
    ctx: typer.Context, run: str | None = None, b: str | None = None, **written: object
) -> None:
    """Show why the KV cache of two runs differs: causes, largest first; they add up to it.

    A folder of run folders, or a quoted glob, is one deployment on several hosts. FILE#2 is the
    second engine start of a log, or the second report of a JSON array.

    A quantity that both equations subtract is a cause by the difference of its size, one that a
    single equation subtracts by its whole size. Every difference is the second run minus the first;
    of one run alone, that run minus the one before it.

    Exit status 0: compared, whatever differs. 2: a wrong argument. 3: a run cannot be read.
    """
    first = find_run(run)
    first, second = (run_before(first), first) if b is None else (first, find_run(b))
    write_result(ctx, diff_reports(read_report(first), read_report(second)), diff_document)


app = command_app(diff, OUTPUT)
