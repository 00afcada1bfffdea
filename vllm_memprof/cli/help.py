"""The commands: their group, one line and two examples each, and the options that matter.

``memprof --help`` is drawn from the table ``commands.toml`` and imports no command. ``--help`` of a
command begins with its examples and shows its ``options``; ``--help-all`` shows every one, and the
whole text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from vllm_memprof.errors import UsageError, require_known
from vllm_memprof.files import read_own

#: What a document is drawn as, in any language; the other formats are names that programs know.
DRAWN = ("table", "markdown", "html")


@dataclass(frozen=True)
class CommandHelp:
    """How a command is presented."""

    examples: Sequence[str]  # two, without "memprof"
    group: str = ""  # in ``memprof --help``; none: it is below another command
    summary: str = ""  # at most 60 characters
    options: Sequence[str] = ()  # those that ``--help`` shows; none: all of them
    formats: Sequence[str] = ("table", "markdown", "json")


EVERY = {name: CommandHelp(**row) for name, row in read_own(__file__, "commands.toml").items()}
COMMANDS = {name: row for name, row in EVERY.items() if row.group}


def draw_overview(formatter: Any) -> None:
    """Write ``memprof --help``."""
    formatter.write("memprof explain engine.log\n")
    formatter.write("memprof plan Qwen/Qwen3-14B --device sim:910b\n\n")
    formatter.write("Usage: memprof COMMAND [ARGUMENTS]\n\n")
    above = ""
    for name, row in COMMANDS.items():
        formatter.write(f"{'' if row.group == above else row.group:<8}{name:<11}{row.summary}\n")
        above = row.group
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
        row = EVERY[path]
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
    """A command with examples in its help, whose ``--format`` and ``--lang`` are those it has."""

    def invoke(self: Any, ctx: Any) -> Any:
        """Run it.

        Raises:
            UsageError: it has no such format or language, or the format is for a file.
        """
        formats = EVERY[self.name].formats if "lang" in ctx.params else ("table",)
        name, lang = ctx.params.get("format_name", "table"), ctx.params.get("lang", "en")
        require_known("--format", name, formats)
        if name in ("html", "trace") and ctx.params["output"] is None and sys.stdout.isatty():
            raise UsageError(f"--format {name} is for a file", hint="-o FILE")
        if lang != "en":
            from vllm_memprof.report.language import LANGUAGES

            require_known("--lang", lang, LANGUAGES)
            if name not in DRAWN:
                raise UsageError(
                    f"--lang {lang} is not there for --format {name}: programs know its names",
                    hint=f"--format {' or '.join(each for each in DRAWN if each in formats)}",
                )
        return super().invoke(ctx)


class HelpGroup(HelpMixin, TyperGroup):
    """A command with others below it."""
