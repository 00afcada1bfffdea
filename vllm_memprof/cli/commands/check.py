"""``memprof check``: a run against a budget file, for CI."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_memprof.cli.runs import Run, find_run
from vllm_memprof.cli.show import (
    DRAWN,
    Lang,
    check_format,
    command_app,
    draw,
    write_out,
    write_result,
)
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.sources import read_report

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.check.budget_file import BudgetFile
    from vllm_memprof.check.outcomes import CheckResult
    from vllm_memprof.check.ratchet import Margin

FORMATS = (*DRAWN, "json", "github")
#: Exit status of a run that is over its budget.
OVER_BUDGET = 1
#: What stands in the place of a budget file where limits are options alone.
_OPTIONS = "options of check"


def check(
    run: Run = None,
    budget: Annotated[
        Path | None,
        typer.Option("--budget", metavar="FILE", help="The budget file (TOML); see docs/ci.md."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="RUN",
            help="The run that the limits of [regression] refer to.",
        ),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="F",
            help="table, markdown, html, json; github: annotations and a job summary.",
        ),
    ] = "table",
    lang: Lang = "en",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write to a file instead of stdout; the budget of --init.",
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            "--junit", metavar="FILE", help="Also write a JUnit XML report, one case per limit."
        ),
    ] = None,
    init: Annotated[
        bool,
        typer.Option(
            "--init", help="Write a budget file from the figures of RUN, instead of checking it."
        ),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update-baseline",
            help="Tighten the limits in FILE to the figures of RUN; never loosen them.",
        ),
    ] = False,
    margin: Annotated[
        str | None,
        typer.Option(
            "--margin",
            metavar="P%",
            help="Margin of the limits of --init and --update-baseline: 0% is exact; default 1%, "
            "and at least 16 MiB where a figure varies from start to start.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Compare with a baseline of other arguments; overwrite a file (--init); "
            "loosen limits (--update-baseline).",
        ),
    ] = False,
    **limits: str | None,
) -> None:
    """Check a run against limits, of options or a budget file; list each with its margin and rank.

    A limit on a figure that was not measured fails, and so does a run that did not end with status
    ok. A baseline must have the same model, engine and version, device, number of ranks, and the
    same arguments that bear on memory.

    Exit status 0: within budget. 1: over budget. 2: a wrong argument, a mistake in the budget file,
    or a baseline that cannot be compared. 3: a run cannot be read.
    """
    from vllm_memprof.check.outcomes import check_report

    check_format(format_name, output, lang=lang, formats=FORMATS)
    room = _margin(margin)
    typed = {name: value for name, value in limits.items() if value is not None}
    if init:
        others = {"--budget": budget, "--baseline": baseline, "--junit": junit}
        options = {f"--{name.replace('_', '-')}": value for name, value in typed.items()}
        _refuse({**others, **options, "--update-baseline": update}, "--init")
        _propose(read_report(find_run(run)), room, output, force)
        return
    if budget is None and (update or baseline is not None or not typed):
        raise UsageError(
            "no limit is given",
            hint=f"--min-kv-cache 40GiB, or --budget FILE: memprof check {run or 'RUN'} --init -o "
            "budget.toml proposes one",
        )
    _refuse({} if update else {"--margin": margin}, "a check without --init or --update-baseline")
    text, held_to = _read_budget(budget, baseline, typed)
    report = read_report(find_run(run))
    before = None if baseline is None else read_report(baseline)
    if before is not None and not force:
        from vllm_memprof.check.baseline import differences

        if found := differences(before, report):
            reasons = "\n  ".join(f"{row.sentence}" for row in found)
            hint = "a baseline of the same set-up, or --force to compare all the same"
            what = f"the baseline cannot be compared with the run:\n  {reasons}"
            raise UsageError(what, hint=hint)
    result = check_report(report, held_to, before)
    if update and not result.limits[0].ok:  # a failed run changes nothing
        result.notes.append(f"{budget} is left as it is: the run did not end well")
    elif update:
        assert budget is not None
        from vllm_memprof.check.budget_file import parse_budget
        from vllm_memprof.check.ratchet import tighten_budget

        turned = tighten_budget(text, str(budget), report, room, force)
        result = check_report(report, parse_budget(turned.text, str(budget)), before)
        result.notes.extend(turned.remarks)
        if turned.text != text:
            _replace(budget, turned.text)
        else:
            result.notes.append(f"{budget} is left as it is: no limit to tighten")
    if junit is not None:
        from vllm_memprof.check.junit import render_check_junit

        write_out(render_check_junit(result), junit)
    if format_name == "github":
        _write_for_github(result, output, budget)
    else:
        from vllm_memprof.check.document import check_document

        write_result(result, check_document, format_name, output, lang)
    if not result.ok:
        raise typer.Exit(OVER_BUDGET)


def _refuse(given: dict[str, object], what: str) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} means nothing with {what}")


def _margin(text: str | None) -> Margin:
    from fractions import Fraction

    from vllm_memprof.check.ratchet import Margin

    if text is None:
        return Margin(Fraction(1, 100))
    try:
        percent = Fraction(text.strip().removesuffix("%").strip()) / 100
    except (ValueError, ZeroDivisionError):
        percent = Fraction(-1)
    if not 0 <= percent <= 1:
        raise UsageError(
            f"--margin {text!r} is not a percentage", hint='e.g. "0.5%", or "0%" for exact limits'
        )
    return Margin(percent, least=False)


def _propose(report: Report, margin: Margin, output: Path | None, force: bool) -> None:
    from vllm_memprof.check.ratchet import propose_budget

    status = report.run.outcome
    if status != "ok" and not force:
        hint = "take a run that ended well, or --force"
        what = f"the run has status {status}: its figures are no measure for others"
        raise UsageError(what, hint=hint)
    text = propose_budget(report, margin)
    if output is None:
        write_out(text, None)
        return
    if output.exists() and not force:
        raise UsageError(
            f"{output} exists", hint="--update-baseline tightens it; --force overwrites it"
        )
    _replace(output, text)
    typer.echo(f"memprof: wrote {output}", err=True)


def _read_budget(
    path: Path | None, baseline: str | None, typed: dict[str, str]
) -> tuple[str, BudgetFile]:
    """Return the text of a budget file and its limits, which need a baseline or have none.

    Args:
        path: of the file.
        baseline: the run of ``--baseline``.
        typed: limits of options, which take the place of those of the file.
    """
    from vllm_memprof.check.budget_file import BudgetFile, parse_budget, parse_option

    given = [parse_option(name, value) for name, value in typed.items()]
    if path is None:
        return "", BudgetFile(_OPTIONS, given)
    try:
        text = path.read_bytes().decode()
    except OSError as exc:
        hint = "memprof check --init RUN -o FILE proposes one"
        what = f"cannot read the budget file {path}: {exc.strerror or exc}"
        raise UsageError(what, hint=hint) from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    limits = parse_budget(text, str(path))
    if limits.needs_baseline and baseline is None:
        hint = "--baseline RUN, a run folder or a report.json"
        raise UsageError(f"[regression] of {path} needs a baseline", hint=hint)
    if baseline is not None and not limits.needs_baseline:
        raise UsageError(f"--baseline is given, and {path} has no limit in [regression]")
    kept = [limit for limit in limits.limits if limit.key.name not in typed]
    return text, replace(limits, limits=[*kept, *given])


def _replace(path: Path, text: str) -> None:
    """Write a file of a repository: follow links, keep its mode, or take that of the umask."""
    path = path.resolve()
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    write_out(text, path)
    path.chmod(mode)


def _write_for_github(result: CheckResult, output: Path | None, budget: Path | None) -> None:
    """Write annotations, which name a file from the root of the repository, and a job summary."""
    from vllm_memprof.check.document import check_document
    from vllm_memprof.check.github import render_check_github

    budget = budget or Path(_OPTIONS)
    root = os.environ.get("GITHUB_WORKSPACE")
    if root and budget.resolve().is_relative_to(Path(root).resolve()):
        budget = budget.resolve().relative_to(Path(root).resolve())
    write_out(render_check_github(result, budget.as_posix()), output)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with open(summary, "a", encoding="utf-8") as stream:
                stream.write(draw(partial(check_document, result), "markdown"))
        except OSError as exc:
            what = f"cannot write the job summary {summary}: {exc.strerror or exc}"
            raise MemprofError(what) from exc


def _limit_options() -> dict[str, Any]:
    """Return an option, with its default, for each key of ``[budget]``."""
    from vllm_memprof.check.limits import BUDGET, FIGURES, KEYS, TOKENS

    return {
        key.name: (
            Annotated[
                str | None,
                typer.Option(
                    f"--{key.name.replace('_', '-')}",
                    metavar="N" if FIGURES[key.figure].unit == TOKENS else "SIZE",
                    help=f"{key.sense.capitalize()} this much: {FIGURES[key.figure].title}.",
                ),
            ],
            None,
        )
        for key in KEYS
        if key.table == BUDGET
    }


app = command_app(check, _limit_options())
