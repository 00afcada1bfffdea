"""``memprof apply``: a checked setting, written into the file that starts the engine."""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path

import typer

from vllm_memprof.cli.arguments import take_model
from vllm_memprof.cli.checked import checked_setting
from vllm_memprof.cli.options import command_app
from vllm_memprof.cli.show import for_the_engine, say, write_out
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here, read_file, reading, write_atomically
from vllm_memprof.options import value_of
from vllm_memprof.plans.write_back import find_start, write_back
from vllm_memprof.record.schema import RunInfo


def apply(run: str, to: Path, yes: bool = False) -> None:
    """Write the setting that a plan has proven into the file that starts the engine.

    RUN: what survived its largest batches. FILE: a shell script, a Kubernetes manifest, or the YAML
    of `vllm serve --config`. The change is shown; --yes, or the answer on a terminal, writes it.

    Exit status 0: written or shown. 1: not wanted. 2: checked with another model or other options,
    or FILE leaves open where it belongs. 3: RUN checks nothing.
    """
    checked = checked_setting(run)
    with reading(to):
        text, mode = read_file(to, None), to.stat().st_mode & 0o7777
    try:
        before = text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{to} is not text in UTF-8") from error
    after = write_back(before, find_start(before, to.name), checked.settings)
    start = find_start(after, to.name)
    if start.program == "memprof":
        split = for_the_engine("serve", start.arguments)
        model, given = split.model, split.engine
    else:
        model, given = take_model(start.arguments)
    model = model or value_of(given, "--model-path") or checked.report.run.model
    checked.require_same(RunInfo("", "serve", model, []), given, "log")
    flags, name = " ".join(checked.words), from_here(to)
    if after == before:
        say(f"{flags} is in {name} already")
        return
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    write_out(
        (
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in unified_diff(old, new, name, name)
        ),
        None,
    )
    if yes or (sys.stdin.isatty() and typer.confirm(f"write {name}?", abort=True, err=True)):
        write_atomically(to.resolve(), after, mode)
        say(f"{flags} written to {name}")
    else:
        say("--yes writes it")


app = command_app(apply)
