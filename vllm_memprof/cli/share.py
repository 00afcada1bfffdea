"""``memprof plan A -- B --share``: several instances on one device, from real plans and starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.plans import Asked, check_setup
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here

if TYPE_CHECKING:
    from vllm_memprof.plans.share_file import Typed

ShareFlag = Annotated[
    bool,
    typer.Option(
        "--share",
        help="Divide one device: MODEL_A [arguments] -- MODEL_B [arguments] --share, or a TOML "
        "file of instances as MODEL.",
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        "--beside",
        metavar="SIZE",
        help="With --share: held on the device by a process that is no engine, from before the "
        "first start.",
    ),
]

#: Exit status: there are no flags with which all start and survive.
NO_ANSWER = 1
#: Key in the context's ``meta`` under which ``plan`` finds the instances.
INSTANCES = "vllm_memprof.instances"
_SHARE = "--share"


class PlanCommand(EngineCommand):
    """``plan``: with ``--share`` anywhere, a lone ``--`` stands between two instances.

    Options of memprof hold for all of them, wherever they stand; ``--want`` for the instance among
    whose arguments it is.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _SHARE not in args:
            return super().parse_args(ctx, args)
        from vllm_memprof.plans.share_file import Typed

        groups: list[list[str]] = [[]]
        for token in args:
            if token == "--":
                groups.append([])
            else:
                groups[-1].append(token)
        own, instances = list[str](), list[Typed]()
        for number, group in enumerate(groups):
            split = self.split(ctx, group)
            wants = [token for token in split.own if token.startswith("--want=")]
            own += [token for token in split.own if token not in wants]
            if split.model is not None:
                texts = [token.removeprefix("--want=") for token in wants]
                instances.append(Typed(split.model, split.engine, texts))
            elif number and (split.engine or wants or len(groups) > 2):
                raise UsageError(
                    f"--share: there is no MODEL behind `--` number {number}",
                    hint="MODEL_A [arguments] -- MODEL_B [arguments] --share",
                )
        ctx.meta[INSTANCES] = instances
        first = [] if not instances else [instances[0].model, *instances[0].engine_args]
        return super().parse_args(ctx, [*own, *(["--", *first] if first else [])])


def share(
    asked: Asked,
    instances: list[Typed],
    own: dict[str, object],
    timeout_s: float,
    beside: str | None,
    headroom: str | None,
) -> int:
    """Divide the device, print the result, and return the exit status.

    Raises:
        MemprofError: a wrong argument, or a start that cannot be begun.
    """
    from vllm_memprof.plans.request import Plan
    from vllm_memprof.plans.share_starts import Instance, ShareJob, check, run_share
    from vllm_memprof.plans.wants import lengths, parse_wants, size_option

    found = []
    for number, typed in enumerate(_from_file(instances)):
        wants = parse_wants(typed.wants, None)[:-1]  # the headroom is that of the device
        own_options = {**own, "until": "ready"}
        plan = Plan.asked(typed.model, typed.engine_args, own_options, timeout_s)
        found.append(Instance(_name(number), replace(plan, lengths=lengths(wants)), wants))
    held, kept = size_option("--beside", beside or "0"), size_option("--headroom", headroom or "0")
    check(found, held)
    check_setup(found[0].plan)
    names = "-".join(each.plan.model.rstrip("/").rpartition("/")[2] for each in found)
    answer, folder = asked.answer(
        f"{names[:80]}-share",
        "share.json",
        lambda command, runner: run_share(ShareJob(found, held, kept, command), runner),
        kept="",
    )
    print(f"memprof: plans and starts are in {from_here(folder)}", file=sys.stderr)
    return 0 if answer.found else NO_ANSWER


def _from_file(instances: list[Typed]) -> list[Typed]:
    """Return the instances, or those of the TOML file that stands in the place of the only one."""
    from vllm_memprof.plans.share_file import SUFFIX, read_instances

    if len(instances) != 1 or not instances[0].model.endswith(SUFFIX):
        return instances
    if instances[0].engine_args or instances[0].wants:
        raise UsageError(
            f"{instances[0].model} has the instances: arguments and --want belong into it"
        )
    return read_instances(Path(instances[0].model))


def _name(number: int) -> str:
    """Return A, B, ... Z, A1, B1, ..."""
    letter = chr(ord("A") + number % 26)
    return letter if number < 26 else f"{letter}{number // 26}"
