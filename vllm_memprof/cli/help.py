"""The commands: their group, one line and two examples each, and the options that matter.

``memprof --help`` is drawn from the table and imports no command. ``--help`` of a command begins
with its examples and shows its ``options``; ``--help-all`` shows every one, and the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class CommandHelp:
    """How a command is presented."""

    summary: str  # at most 60 characters
    examples: tuple[str, str]  # without "memprof"
    #: Those that ``--help`` shows; none: all of them.
    options: tuple[str, ...] = ()


_RUN = ("--device", "--engine", "--stack", "--run-dir", "--format", "--quiet")
_PLAN = ("--device", "--engine", "--stack", "--run-dir", "--format", "--until")

#: Group -> command -> its help, in the order of ``memprof --help``.
GROUPS = {
    "Run": {
        "serve": CommandHelp(
            "start the engine's server, report its memory, watch it",
            ("serve Qwen/Qwen3-8B -tp 2", "serve Qwen/Qwen3-8B --device sim:910b --sample 16"),
            (*_RUN, "--sample", "--live", "--metrics-port", "--trace-allocations"),
        ),
        "offline": CommandHelp(
            "run prompts without a server, then report",
            (
                "offline Qwen/Qwen3-8B --prompts prompts.jsonl",
                'offline Qwen/Qwen3-8B --prompt "Hello" --device sim:910b',
            ),
            (*_RUN, "--prompts", "--prompt", "--images", "--max-tokens"),
        ),
        "attach": CommandHelp(
            "watch a run that another terminal started",
            ("attach", "attach qwen3-8b --live"),
        ),
    },
    "Read": {
        "explain": CommandHelp(
            "why a log failed, or its report",
            ("explain engine.log", "explain engine.log --format markdown -o answer.md"),
        ),
        "report": CommandHelp(
            "print a recorded run, in any format",
            ("report", "report qwen3-8b --format html -o report.html"),
        ),
        "glossary": CommandHelp(
            "what a word of a report means",
            ("glossary headroom", 'glossary "peak activation"'),
        ),
        "diff": CommandHelp(
            "why the KV cache of two runs differs",
            ("diff reports/old reports/new", "diff qwen3-8b"),
        ),
        "check": CommandHelp(
            "hold a run to limits, for CI",
            ("check --min-kv-cache 40GiB", "check reports/new --budget budget.toml"),
            (
                "--budget", "--baseline", "--min-kv-cache", "--min-kv-cache-tokens",
                "--min-headroom", "--max-weights", "--max-non-torch", "--format", "--output",
                "--init",
            ),
        ),
    },
    "Decide": {
        "plan": CommandHelp(
            "does it fit: the KV cache of one set of options",
            (
                "plan Qwen/Qwen3-14B --device sim:910b --max-model-len 32768",
                "plan Qwen/Qwen3-14B -tp 2 --device sim:910b --until ready",
            ),
            (*_PLAN, "--ranks", "--rank", "--quiet", "--startup-timeout"),
        ),
        "fit": CommandHelp(
            "search the limit of an option, or the fewest devices",
            (
                "fit Qwen/Qwen3-14B --find max-model-len --device sim:910b",
                "fit Qwen/Qwen3-32B --find devices --want tokens=500000 --device sim",
            ),
            (
                "--find", "--want", "--headroom", "--between", "--step", "--device", "--stack",
                "--until", "--run-dir", "--format",
            ),
        ),
        "share": CommandHelp(
            "divide one device between several models",
            (
                "share Qwen/Qwen3-8B -- Qwen/Qwen3-0.6B --device sim:910b",
                "share Qwen/Qwen3-8B --want tokens=50000 -- Qwen/Qwen3-0.6B --device sim",
            ),
            (
                "--want", "--headroom", "--beside", "--device", "--stack", "--run-dir", "--format",
                "--quiet", "--startup-timeout", "--no-cache",
            ),
        ),
        "sweep": CommandHelp(
            "plan all combinations of some options' values",
            (
                "sweep Qwen/Qwen3-14B --over max-num-seqs=64,128,256 --device sim:910b",
                "sweep Qwen/Qwen3-14B --over device=sim:910b,sim:a3 -tp 2",
            ),
            (
                "--over", "--jobs", "--ray", "--output", "--device", "--stack", "--until",
                "--ranks", "--format", "--no-cache",
            ),
        ),
        "calibrate": CommandHelp(
            "correct a simulated device by a run or log from hardware",
            (
                "calibrate Qwen/Qwen3-14B --run engine.log --device sim:910b",
                "calibrate Qwen/Qwen3-14B --run reports/new --device sim:910b -tp 2",
            ),
            (*_PLAN, "--run", "--ranks", "--quiet", "--no-cache"),
        ),
    },
    "Set up": {
        "doctor": CommandHelp(
            "what this machine has for a run, and what is missing",
            ("doctor", "doctor --device npu"),
        ),
        "who": CommandHelp(
            "which processes use a device; wait until it is free",
            ("who", "who --device npu --only 0,1 --wait FREE=50GiB"),
        ),
        "sim": CommandHelp(
            "simulated devices, and the engine stacks for them",
            ("sim setup", "sim list"),
        ),
    },
}  # fmt: skip
#: Commands below another one.
BELOW = {
    "sim setup": CommandHelp("", ("sim setup", "sim setup --stack vllm-ascend-0.13.0")),
    "sim list": CommandHelp("", ("sim list", "sim setup --stack vllm-ascend-0.13.0")),
    "sim stop": CommandHelp("", ("sim stop", "sim list")),
    "sim calibrate": CommandHelp(
        "",
        (
            "sim calibrate reports/new -o device.toml",
            "sim calibrate reports/new --row published.toml",
        ),
    ),
    "sim selftest": CommandHelp("", ("sim selftest", "sim selftest --stack vllm-ascend-0.23.0")),
}
COMMANDS = {name: row for group in GROUPS.values() for name, row in group.items()}


def draw_overview(formatter: Any) -> None:
    """Write ``memprof --help``."""
    formatter.write("memprof explain engine.log\n")
    formatter.write("memprof plan Qwen/Qwen3-14B --device sim:910b\n\n")
    formatter.write("Usage: memprof COMMAND [ARGUMENTS]\n\n")
    for group, commands in GROUPS.items():
        for name, row in commands.items():
            formatter.write(f"{group:<8}{name:<11}{row.summary}\n")
            group = ""
    formatter.write("\nmemprof COMMAND --help shows its examples and options; --version;\n")
    formatter.write("--install-completion: TAB for commands, runs, devices, stacks, models\n")


class HelpMixin:
    """Of commands: their help, by the table."""

    every_option = False

    def make_context(self: Any, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
        own = args[: args.index("--")] if "--" in args else args
        self.every_option = "--help-all" in own
        typed = ["--help"] if self.every_option else args
        return super().make_context(info_name, typed, *rest, **extra)  # type: ignore[misc]

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        path = ctx.command_path.removeprefix("memprof ")
        row = {**COMMANDS, **BELOW}[path]
        if not self.every_option:  # what is hidden here is hidden for good: the help ends it
            summary, *more = self.help.split("\n\n")
            hidden = [
                param
                for param in self.params
                if row.options and param.param_type_name == "option"
                if not {*param.opts} & {*row.options}
            ]
            for param in hidden:
                param.hidden = True
            if hidden or more:
                rest = f"Everything: memprof {path} --help-all"
                vars(self).update(help=summary, epilog=f"{self.epilog or ''}\n\n{rest}")
        formatter.write("".join(f"memprof {example}\n" for example in row.examples) + "\n")
        super().format_help(ctx, formatter)  # type: ignore[misc]


class HelpCommand(HelpMixin, TyperCommand):
    """A command with examples in its help."""


class HelpGroup(HelpMixin, TyperGroup):
    """A command with others below it."""
