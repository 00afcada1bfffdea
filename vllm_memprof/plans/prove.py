"""Cures, tried: the report of a start that failed for memory enters, one whose cures are checked
leaves.

The start is planned on a simulated device as it was, and must fail there as it did; then with one
cure after the other, each with lower values where it is not enough, until a plan comes up and
survives its largest batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_memprof.accounting.budget.engine_options import is_cuda
from vllm_memprof.accounting.model import Report
from vllm_memprof.engines import row_of_run
from vllm_memprof.errors import RunRecordError
from vllm_memprof.options import value_of
from vllm_memprof.plans.calibrated import command_of
from vllm_memprof.plans.device_facts import arguments_of, base_of, with_variables
from vllm_memprof.plans.model import READY, TABLES, Plan, folder_name
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.record.cause import Cure, NamedFailure
from vllm_memprof.sim.presets import list_presets
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.text import join, text

#: Plans with a cure, at most.
_MOST_PLANS = 4


def start_of(report: Report, device: str | None) -> tuple[Plan, str]:
    """Return the plan of a start that failed, and what it is made on.

    Args:
        report: of a run or a log.
        device: to plan on, as ``--device`` has it; None: that of the report.

    Raises:
        MemprofError: it did not fail for memory, or cannot be planned.
    """
    run, failure, arguments = report.run, report.failure, arguments_of(report)
    here = run.engine and not is_cuda(run.engine, run.device) and report.deployment is None
    if failure is None or not failure.is_memory or not here or arguments is None:
        raise RunRecordError(
            "no cure is tried: that takes a failure for memory, of an engine on one host with "
            "NPUs, and the engine's arguments"
        )
    # a log has the path of its own machine
    end = "/" + run.model_name
    model = next((each.name for each in list_presets() if each.name.endswith(end)), "")
    own = {"engine": row_of_run(run.engine).name, "until": READY}
    own["device"] = device or f"sim:{base_of(run)}"
    plan, notes = command_of(report, None, arguments, Plan.asked(model, [], own, 600))
    prepare_runtime(plan.device.profile or "", plan.stack)
    on = text("{device}, {stack}, one rank of {model}", plan, device=own["device"])
    return plan, join("; ", [on, *notes])


def proved(report: Report, plan: Plan, on: str, runner: PlanRunner) -> Iterator[Report]:
    """Yield the report with what is known of its cures, plan by plan.

    Args:
        report: of a start that failed for memory.
        plan: of the same start.
        on: what it is made on.
        runner: makes the plans.

    Raises:
        Interrupted: by a signal.
    """
    failure, variables = report.failure, with_variables(report.run.env)
    assert failure is not None

    def make(cure: Cure) -> tuple[NamedFailure | None, Cure]:
        """Plan with a cure; return what fails then, and the cure with what came of it."""
        varied, environ, value = plan, variables, cure.value or ""
        if cure.argument is not None:
            varied = plan.vary(cure.argument, value)
        elif cure.environment is not None:
            environ = {**variables, cure.environment: value}
        varied = replace(varied, values={"change": cure.change})
        row = runner.make_one(0, varied, folder_name(0, varied), environ)
        if row.survived:
            survives = text("{why}: it starts and survives its largest batches", cure)
            return None, replace(cure, enough="checked", why=survives)
        found = runner.report(row)
        why = None if found is None else found.failure
        short = why is not None and why.is_memory
        reason = why.title if why else row.reason or row.status
        tried = text("tried: {reason}", reason=reason)
        return why, replace(cure, enough="no" if short else "unknown", why=tried)

    there, _ = make(Cure("", action="as it was"))
    if there is None or there.kind != failure.kind:
        on = join("; ", [on, text("it does not fail there like that: no cure is tried")])
        yield replace(report, failure=replace(failure, tried_on=on))
        return
    cures, tries = [*failure.cures], 0
    for cure in failure.cures:
        trial = _lower(cure, plan, there) if cure.value is None else cure
        while trial is not None and tries < _MOST_PLANS:
            last, outcome = make(trial)
            tries += 1
            checked = outcome.enough == "checked"
            cures = [each for each in cures if each != cure]
            cures.insert(0 if checked else len(cures), outcome)
            yield replace(report, failure=replace(failure, cures=[*cures], tried_on=on))
            if checked:
                return
            trial = _lower(trial, plan, last or there)


def _lower(cure: Cure, plan: Plan, failure: NamedFailure) -> Cure | None:
    """Return a cure with the next value to try: as the last plan computes it, else by halves.

    Args:
        cure: with the value that was tried last, if any.
        plan: of the start as it was.
        failure: of the last plan.

    Returns:
        None: there is none.
    """
    name = cure.argument or ""
    value = {each.argument: each.value for each in failure.cures}.get(name)
    if value in (None, cure.value) and name in TABLES["halved"]:
        given = cure.value or value_of(plan.engine_args, name) or ""
        value = str(int(given) // 2) if given.isdecimal() else None
    return None if value in (None, cure.value) else replace(cure, value=value)
