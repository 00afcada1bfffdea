"""``memprof share``: several instances on one device, from real plans and starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from vllm_memprof.cli import plans
from vllm_memprof.cli.arguments import ENGINE_ARGS, EngineCommand
from vllm_memprof.cli.options import ANSWER, command_app
from vllm_memprof.cli.show import say
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here
from vllm_memprof.plans.documents import share_document
from vllm_memprof.plans.share import Typed, read_instances
from vllm_memprof.plans.share_starts import Instance, ShareJob, check, run_share
from vllm_memprof.plans.wants import lengths, parse_wants, size_option

#: Exit status: there are no flags with which all start and survive.
NO_ANSWER = 1
#: Key in the context's ``meta`` under which the instances are.
INSTANCES = "vllm_memprof.instances"
_USAGE = "memprof share MODEL_A [arguments] -- MODEL_B [arguments]"


class ShareCommand(EngineCommand):
    """A lone ``--`` stands between two instances.

    Options of memprof hold for all of them, wherever they stand; ``--want`` for the instance among
    whose arguments it is.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:

        own, instances = list[str](), list[Typed]()
        groups = (list(group) for dash, group in groupby(args, "--".__eq__) if not dash)
        for number, group in enumerate(groups):
            split = self.split(ctx, group)
            wants = [token for token in split.own if token.startswith("--want=")]
            own += [token for token in split.own if token not in wants]
            if split.model is not None:
                texts = [token.removeprefix("--want=") for token in wants]
                instances.append(Typed(split.model, split.engine, texts))
            elif number:
                raise UsageError(f"there is no MODEL behind `--` number {number}", hint=_USAGE)
        ctx.meta[INSTANCES] = instances
        first = [] if not instances else [instances[0].model, *instances[0].args]
        return super().parse_args(ctx, [*own, *(["--", *first] if first else [])])


def share(ctx: typer.Context, headroom: str = "0", beside: str = "0", **options: object) -> None:
    """Divide one simulated device between MODEL [arguments] -- MODEL [arguments] ...

    Plans each alone, computes utilizations with which all start and survive, and starts all beside
    each other with them. Each gets what its --want says, and the rest in equal parts of bytes. A
    TOML file of instances may stand in the place of MODEL.

    Exit status 0: found. 1: there are no such utilizations. 2: a wrong argument.
    """
    found, asked = [], ctx.meta[INSTANCES]
    if len(asked) == 1 and asked[0].model.endswith(".toml"):
        if asked[0].args or asked[0].want:
            raise UsageError(
                f"{asked[0].model} has the instances: arguments and --want belong into it"
            )
        asked = read_instances(Path(asked[0].model))
    for number, typed in enumerate(asked):
        wants = parse_wants(typed.want, None)[:-1]  # the headroom is that of the device
        ctx.params["model"], ctx.meta[ENGINE_ARGS] = typed.model, typed.args
        plan = plans.requested_plan(ctx, until="ready")
        turn, place = divmod(number, 26)  # A, B, ... Z, A1, B1, ...
        name = f"{chr(ord('A') + place)}{turn or ''}"
        found.append(Instance(name, replace(plan, lengths=lengths(wants)), wants))
    held, kept = size_option("--beside", beside), size_option("--headroom", headroom or "0")
    check(found, held)
    plans.check_setup(found[0].plan)
    names = "-".join(each.plan.model.rstrip("/").rpartition("/")[2] for each in found)
    answer, folder = plans.answer(
        ctx,
        f"{names[:80]}-share",
        lambda runner: run_share(ShareJob(found, held, kept), runner),
        share_document,
        kept="",
    )
    say(f"plans and starts are in {from_here(folder)}")
    if not answer.found:
        raise typer.Exit(NO_ANSWER)


# --want is read with the instance that it is of
app = command_app(share, {"want": (list[str] | None, None), **ANSWER}, ShareCommand)
