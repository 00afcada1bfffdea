"""``memprof check``: a run against a budget file, for CI."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.baseline import differences
from vllm_memprof.check.budget_file import BudgetFile, parse_budget, parse_option
from vllm_memprof.check.ci import render_check_github, render_check_junit
from vllm_memprof.check.document import check_document
from vllm_memprof.check.limits import BUDGET, KEYS, TOKENS
from vllm_memprof.check.outcomes import CheckResult, check_report
from vllm_memprof.check.ratchet import Margin, propose_budget, tighten_budget
from vllm_memprof.cli.options import OUTPUT, Options, command_app
from vllm_memprof.cli.show import draw, find_run, say, write_out, write_result
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.files import reading
from vllm_memprof.options import value_of
from vllm_memprof.sources import read_report

#: Exit status of a run that is over its budget.
OVER_BUDGET = 1
#: What stands in the place of a budget file where limits are options alone.
_OPTIONS = "options of check"


def check(
    ctx: typer.Context,
    run: list[str] | None = None,
    plan: str | None = None,
    stack: str | None = None,
    budget: Path | None = None,
    baseline: str | None = None,
    junit: Path | None = None,
    init: bool = False,
    update: bool = False,
    margin: str | None = None,
    force: bool = False,
    **options: object,
) -> None:
    """Check runs against limits, of options or a budget file; list each with its margin and rank.

    A limit on a value that was not measured fails, and so does a run that did not end with status
    ok. A baseline must have the same model, engine and version, device, number of ranks, and
    arguments that bear on memory.

    Exit status 0: within budget. 1: over budget. 2: a wrong argument, a mistake in the budget file,
    or a baseline that cannot be compared. 3: a run cannot be read.
    """
    room = _margin(margin)
    output: Path | None = ctx.params["output"]
    typed = {name: str(ctx.params[name]) for name in _LIMITS if ctx.params[name] is not None}
    if init:
        given = {"budget": budget, "baseline": baseline, "junit": junit, "update_baseline": update}
        for name, value in {**given, **typed}.items():
            if value:
                raise UsageError(f"--{name.replace('_', '-')} means nothing with --init")
        _propose(read_report(find_run(run[0] if run else None)), room, output, force)
        return
    if budget is None and (update or baseline is not None or not (typed or plan)):
        raise UsageError(
            "no limit is given",
            "--min-kv-cache 40GiB, or --budget FILE: memprof check "
            f"{' '.join(run or ['RUN'])} --init -o budget.toml proposes one",
        )
    if margin and not update:
        raise UsageError("--margin means nothing with a check without --init or --update-baseline")
    document = output or ctx.params["format_name"] in ("json", "html")
    if len(run or []) > 1 and (document or junit or update):
        raise UsageError("a file, JSON, HTML and --update-baseline are of one run")
    text, limits = _read_budget(budget, baseline, typed)
    before = None if baseline is None else read_report(baseline)

    def is_ok(run: str | None) -> bool:
        report = read_report(find_run(run))
        if before is not None and not force and (found := differences(before, report)):
            reasons = "\n  ".join(found)
            hint = "a baseline of the same set-up, or --force to compare all the same"
            what = f"the baseline cannot be compared with the run:\n  {reasons}"
            raise UsageError(what, hint)
        result = check_report(report, limits, before)
        if update and not result.limits[0].ok:  # a failed run changes nothing
            result.notes.append(f"{budget} is left as it is: the run did not end well")
        elif update:
            assert budget is not None
            changed, remarks = tighten_budget(text, str(budget), report, room, force)
            result = check_report(report, parse_budget(changed, str(budget)), before)
            result.notes.extend(remarks)
            if changed != text:
                _put(budget, changed)
            else:
                result.notes.append(f"{budget} is left as it is: no limit to tighten")
        if junit is not None:
            write_out(render_check_junit(result), junit)
        if ctx.params["format_name"] == "github":
            _write_for_github(result, output, budget or Path(_OPTIONS))
        else:
            write_result(ctx, result, check_document)
        return result.ok

    runs: list[str | None] = [*run] if run else [None]
    if plan is not None:
        runs = [_plan(config, plan, stack) for config in run or []]
    if [each for each in runs if not is_ok(each)]:
        raise typer.Exit(OVER_BUDGET)


def _plan(config: str, device: str, stack: str | None) -> str:
    """Plan what a file of vLLM's ``--config`` serves; return the run folder.

    Raises:
        UsageError: it names no model, or no plan was begun.
        RunRecordError: it cannot be read.
    """
    from vllm_memprof.launch.folder import default_run_dir
    from vllm_memprof.plans.model import Plan
    from vllm_memprof.plans.runner import run_plan
    from vllm_memprof.plans.write_back import config_words

    with reading(config):
        text = Path(config).read_text("utf-8", "replace")
    model = value_of([word.text for word in config_words(text)], "--model")
    if model is None:
        hint = "a line `model: NAME`, as vllm serve --config FILE takes it"
        raise UsageError(f"{config} names no model", hint)
    plan = Plan.asked(model, ["--config", config], {"device": device, "stack": stack}, 600.0)
    run_dir = default_run_dir(Path(config).stem).absolute()
    run_dir.parent.mkdir(exist_ok=True)
    say(f"planning {config}")
    row = run_plan(plan, run_dir)
    if not run_dir.exists():
        raise UsageError(f"{config} was not planned: {row.reason}", "memprof sim setup")
    return str(run_dir)


def _margin(text: str | None) -> Margin:

    if text is None:
        return Margin(Fraction(1, 100))
    try:
        percent = Fraction(text.strip().removesuffix("%").strip()) / 100
    except (ValueError, ZeroDivisionError):
        percent = Fraction(-1)
    if not 0 <= percent <= 1:
        raise UsageError(
            f"--margin {text!r} is not a percentage", 'e.g. "0.5%", or "0%" for exact limits'
        )
    return Margin(percent, least=False)


def _propose(report: Report, margin: Margin, output: Path | None, force: bool) -> None:

    status = report.run.outcome
    if status != "ok" and not force:
        hint = "take a run that ended well, or --force"
        what = f"the run has status {status}: its figures are no measure for others"
        raise UsageError(what, hint)
    if output is not None and output.exists() and not force:
        hint = "--update-baseline tightens it; --force overwrites it"
        raise UsageError(f"{output} exists", hint)
    text = propose_budget(report, margin)
    if output is None:
        write_out(text, None)
        return
    _put(output, text)
    say(f"wrote {output}")


def _read_budget(
    path: Path | None, baseline: str | None, typed: dict[str, str]
) -> tuple[str, BudgetFile]:
    """Return the text of a budget file and its limits, which need a baseline or have none.

    Args:
        path: of the file.
        baseline: the run of ``--baseline``.
        typed: limits of options, which take the place of those of the file.
    """
    given = [parse_option(name, value) for name, value in typed.items()]
    if path is None:
        return "", BudgetFile(_OPTIONS, given)
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as exc:
        hint = "memprof check --init RUN -o FILE proposes one"
        what = f"cannot read the budget file {path}: {getattr(exc, 'strerror', exc)}"
        raise UsageError(what, hint) from exc
    limits = parse_budget(text, str(path))
    if limits.needs_baseline and baseline is None:
        hint = "--baseline RUN, a run folder or a report.json"
        raise UsageError(f"[regression] of {path} needs a baseline", hint)
    if baseline is not None and not limits.needs_baseline:
        raise UsageError(f"--baseline is given, and {path} has no limit in [regression]")
    kept = [limit for limit in limits.limits if limit.key.name not in typed]
    return text, replace(limits, limits=[*kept, *given])


def _put(path: str | Path, text: str, mode: str = "w") -> None:
    """Write a file that is not memprof's own: a link is followed, its mode stays.

    Raises:
        MemprofError: it cannot be written.
    """
    try:
        with open(path, mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as exc:
        what = "the job summary " if mode == "a" else ""
        raise MemprofError(f"cannot write {what}{path}: {exc.strerror or exc}") from exc


def _write_for_github(result: CheckResult, output: Path | None, budget: Path) -> None:
    """Write annotations, which name a file from the root of the repository, and a job summary."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if root and budget.resolve().is_relative_to(Path(root).resolve()):
        budget = budget.resolve().relative_to(Path(root).resolve())
    write_out(render_check_github(result, budget.as_posix()), output)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        _put(summary, draw(partial(check_document, result), "markdown"), "a")


def _limits() -> Options:
    """Return an option, with its default, for each key of ``[budget]``."""
    return {
        key.name: (
            Annotated[
                str | None,
                typer.Option(
                    f"--{key.name.replace('_', '-')}",
                    metavar=size,
                    help=f"{key.sense.capitalize()} {size} of {key.figure.title}.",
                ),
            ],
            None,
        )
        for key in KEYS
        if key.table == BUDGET
        for size in ["TOKENS" if key.figure.unit == TOKENS else "SIZE"]
    }


_LIMITS = _limits()
app = command_app(check, {**OUTPUT, **_LIMITS})
