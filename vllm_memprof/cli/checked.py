"""A setting that a plan has shown to survive its largest batches, and the starts it holds for.

It holds for what a baseline is comparable with (``check.baseline``): the same model, engine and
release, device, and arguments and variables that bear on memory, parallel sizes and graphs among
them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.check.baseline import decides
from vllm_memprof.cli.show import find_run, for_the_engine
from vllm_memprof.compare.changes import changes
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.files import read_json
from vllm_memprof.options import setting, value_of
from vllm_memprof.plans.knobs import DEVICES, KNOBS
from vllm_memprof.plans.model import OWN_OPTIONS, Fit
from vllm_memprof.plans.runner import PLANS_DIR
from vllm_memprof.plans.store import PLAN_FILE, report_of
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import RunInfo

_RANKS = next(knob.option for knob in KNOBS if knob.name == DEVICES)
#: Of vLLM alone; beside it the share decides nothing.
_FIXED_SIZE = "--kv-cache-memory-bytes"


class Checked(NamedTuple):
    """Options with values, and the plan that survived with them."""

    settings: dict[str, str]  # option -> value
    report: Report
    arguments: list[str]  # of its engine

    @property
    def words(self) -> list[str]:
        return [word for each in self.settings.items() for word in setting([], *each)]

    def require_same(self, info: RunInfo, arguments: Sequence[str], source: str = "hooks") -> None:
        """Refuse a start that the setting was not checked for.

        Args:
            info: of the start, as far as it is known.
            arguments: of its engine, the settings among them.
            source: log: what the start does not say, as a file, is not compared.

        Raises:
            UsageError: with what differs, both values of each.
        """
        ran = self.report.run
        info = replace(info, model=info.model_name, command=["vllm", "serve", *arguments])
        own = replace(
            ran,
            model=ran.model_name,
            command=["vllm", "serve", *self.arguments],
            device=ran.device_profile or ran.device,  # the name of a start that is not there yet
        )
        start = build_report(Run(Path(), info, [], source=source))
        apart = [
            f"{each.name} {each.a or 'not given'} when checked, {each.b or 'not given'} here"
            for each in changes(replace(self.report, run=own), start)
            if decides(each) and (each.kind != "device" or each.b is not None)
        ]
        if apart:
            raise UsageError(
                f"{' '.join(self.words)} was checked for another start: {'; '.join(apart)}",
                "memprof plan MODEL --until ready with the arguments of this start, or memprof fit",
            )


def checked_setting(name: str) -> Checked:
    """Return what a run folder proves: the answer of a search, the cure of a failure, or the memory
    setting of a plan.

    Args:
        name: of the folder of ``memprof fit``, of ``--prove`` or of one plan.

    Raises:
        RunRecordError: it cannot be read, or nothing in it survived its largest batches.
    """
    folder, varied = Path(find_run(name)), dict[str, str]()
    plans: Iterable[Path] = [folder]
    try:
        if (folder / "fit.json").exists():
            best = from_json(Fit, read_json(folder / "fit.json")).best
            plans = [] if best is None else [folder / str(best.plan.run)]
        elif (folder / PLANS_DIR).is_dir():
            plans = [each.parent for each in (folder / PLANS_DIR).glob(f"*/{PLAN_FILE}")]
        found = [
            (plan, report)
            for plan in plans
            for report in [report_of(plan)]
            if report.run.outcome == "ok" and (step := report.run.full_step) and step.ran
        ]
        if len(found) == 1 and (found[0][0] / PLAN_FILE).exists():
            varied = read_json(found[0][0] / PLAN_FILE)["row"]["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunRecordError(f"{name} has a plan that cannot be read: {error}") from error
    if len(found) != 1:
        what = "several plans" if found[1:] else "no plan"
        raise RunRecordError(
            f"{name} checks no setting: {what} of it survived the largest batches",
            "memprof fit MODEL --find gpu-memory-utilization, or memprof plan MODEL --until "
            "ready; then name its folder",
        )
    [(_, report)] = found
    arguments = for_the_engine("plan", report.run.command[2:]).engine
    settings = dict[str, str]()
    for each, value in varied.items():
        words = [f"--{each}", value]
        if each == DEVICES:  # of which this size is a factor
            words = [_RANKS, value_of(arguments, _RANKS) or value]
        if each == "change":  # a cure, as it is typed
            words = shlex.split(value)
        if not words[0].startswith("-"):
            raise RunRecordError(f"{name} checks {value}, which is not an option: set it yourself")
        if each not in OWN_OPTIONS:
            settings[words[0]] = " ".join(words[1:]) or "true"
    share = share_of(report.ranks[0], report.run.engine)
    used = None if share.value is None else f"{share.value:g}"
    for option, other in ((_FIXED_SIZE, None), (share.option, used)):
        given = value_of(arguments, option) or other
        if not settings and given is not None:
            settings = {option: given}
    if not settings:
        raise RunRecordError(f"{name} does not say with which {share.option} it survived")
    checked = Checked(settings, report, arguments)
    missing = [] if value_of(arguments, *settings) is not None else checked.words
    return checked._replace(arguments=[*arguments, *missing])
