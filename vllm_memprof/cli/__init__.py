"""The ``memprof`` command: looks up commands, turns errors into messages and exit statuses.

Importing this module loads Typer and nothing heavier: commands import what they need when they run.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from vllm_memprof.cli.help import COMMANDS, draw_overview
from vllm_memprof.errors import MemprofError, UsageError, did_you_mean
from vllm_memprof.version import __version__

#: Reports are hundreds of thousands of small objects without a cycle: collecting garbage as often
#: as by default costs a quarter of the time of a large run and frees nothing.
_COLLECT_AFTER = (100_000, 50, 100)
#: Exit status after Ctrl-C, as a shell reports a process that died of SIGINT.
EXIT_INTERRUPTED = 130


class _LazyGroup(TyperGroup):
    """A command group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"vllm_memprof.cli.commands.{cmd_name}")
        command: Any = typer.main.get_command(module.app)
        command.name, command.short_help = cmd_name, COMMANDS[cmd_name].summary
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise UsageError(
                f"there is no command {args[0]!r}",
                hint=did_you_mean(args[0], COMMANDS, "memprof --help"),
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        draw_overview(formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _memprof() -> None:
    """Show where device memory goes when vLLM serves a model, and how much KV cache fits."""


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: without the program's name; default: those of this process.

    Returns:
        The exit status. Typer ends the process itself (``SystemExit``) for its own usage errors.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    if (sys.argv[1:] if args is None else args)[:1] == ["--version"]:
        print(f"memprof {__version__}")
        return 0
    try:
        app(args=args, prog_name="memprof")
    except MemprofError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left, e.g. `| head`
        return 1
    return 0


def print_error(error: MemprofError) -> None:
    """Print an error for the user: one sentence, and what to try next. No traceback."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("memprof: ", "bold red"), error.message))
    if error.hint:
        console.print(Text.assemble(("  try: ", "bold"), error.hint))
