"""A setting that a plan has shown to survive its largest batches, and the starts it holds for.

It holds for what a baseline is comparable with (``check.baseline``): the same model, engine and
release, device, and arguments and variables that bear on memory, parallel sizes and graphs among
them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.check.baseline import decides
from vllm_memprof.cli.show import find_run, for_the_engine
from vllm_memprof.compare.changes import changes
from vllm_memprof.engines import row_of_run
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.files import reading
from vllm_memprof.options import value_of, with_option
from vllm_memprof.plans.knobs import KNOBS
from vllm_memprof.plans.model import OWN_OPTIONS, Fit
from vllm_memprof.plans.runner import PLANS_DIR
from vllm_memprof.plans.store import PLAN_FILE, report_of
from vllm_memprof.plans.write_back import find_start
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import RunInfo

#: Of vLLM alone; beside it the share decides nothing.
_FIXED_SIZE = "--kv-cache-memory-bytes"


@dataclass(frozen=True)
class Checked:
    """Options with values, and the plan that survived with them."""

    settings: dict[str, str]  # option -> value
    report: Report
    model: str
    arguments: list[str]  # of its engine

    @property
    def flags(self) -> str:
        return " ".join(f"{name} {value}".strip() for name, value in self.settings.items())

    def added(self, arguments: Sequence[str], over: bool = False) -> list[str]:
        """Return arguments with the settings; what they give already stays unless ``over``."""
        words = list(arguments)
        for name, value in self.settings.items():
            if over or value_of(words, name) is None:
                negatable = row_of_run(self.report.run.engine).arguments.negatable
                words = with_option(words, name, value, negatable)
        return words

    def require_same(self, info: RunInfo, arguments: Sequence[str], source: str = "hooks") -> None:
        """Refuse a start that the setting was not checked for.

        Args:
            info: of the start, as far as it is known.
            arguments: of its engine, the settings among them.
            source: log: what the start does not say, as a file, is taken to be the same.

        Raises:
            UsageError: with what differs, both values of each.
        """
        model, words = self.model, [*arguments]
        if (config := value_of(words, "--config")) is not None:
            with reading(config):
                given = find_start(Path(config).read_text(encoding="utf-8"), config).arguments
            words = [*given, *with_option(words, "--config", "off", negatable=False)]
        if info.model.rstrip("/").rpartition("/")[2] != model.rstrip("/").rpartition("/")[2]:
            model = info.model
        if not info.simulated and self.report.run.simulated and source == "hooks":
            info = replace(info, device="a real one")
        info = replace(info, model=model, command=["vllm", "serve", *words])
        start = build_report(Run(Path(), info, [], source=source))
        command = ["vllm", "serve", *self.added(self.arguments, over=True)]
        ran = self.report.run
        device = ran.device_profile or ran.device  # a device that is not there yet has no more
        ran = replace(ran, model=self.model, command=command, device=device)
        own = replace(self.report, run=ran)
        apart = [
            f"{each.name} {each.a or 'not given'} when checked, {each.b or 'not given'} here"
            for each in changes(own, start)
            if decides(each) and (each.kind != "device" or each.b is not None)
        ]
        if apart:
            raise UsageError(
                f"{self.flags} was checked for another start: {'; '.join(apart)}",
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
    folder, settings = Path(find_run(name)), dict[str, str]()
    plans = [folder]
    if (folder / "fit.json").exists():
        with reading(folder):
            found = from_json(Fit, json.loads((folder / "fit.json").read_text(encoding="utf-8")))
        best = found.best
        plans = [] if best is None else [folder / str(best.plan.run)]
        settings = {found.option: found.answer or ""}
    elif (folder / PLANS_DIR).is_dir():
        plans = sorted(each for each in (folder / PLANS_DIR).iterdir() if each.is_dir())
    survived = [
        (plan, report)
        for plan in plans
        for report in [report_of(plan)]
        if report.run.outcome == "ok" and report.run.full_step and report.run.full_step.ran
    ]
    if len(survived) != 1:
        what = f"{len(survived)} plans" if survived else "no plan"
        raise RunRecordError(
            f"{name} checks no setting: {what} of it survived the largest batches",
            "memprof fit MODEL --find gpu-memory-utilization, or memprof plan MODEL --until ready; "
            "then name its folder",
        )
    plan, report = survived[0]
    split = for_the_engine("plan", report.run.command[2:])
    if not settings and (plan / PLAN_FILE).exists():
        values = json.loads((plan / PLAN_FILE).read_text(encoding="utf-8"))["row"]["values"]
        change, *value = shlex.split(values.pop("change", "")) or [""]
        if change and not change.startswith("-"):
            raise RunRecordError(f"{name} checks {change}, which is not an option: set it yourself")
        settings = {change: "".join(value) or "true"} if change else {}
        options = {knob.name: knob.option for knob in KNOBS}
        settings |= {
            options.get(each, f"--{each.lstrip('-')}"): value
            for each, value in values.items()
            if each not in OWN_OPTIONS
        }
    if not settings and (size := value_of(split.engine, _FIXED_SIZE)) is not None:
        settings = {_FIXED_SIZE: size}
    if not settings:
        share = share_of(report.ranks[0])
        settings = {share.option: f"{share.value:g}"}
    return Checked(settings, report, split.model or report.run.model, split.engine)
