"""Options of the commands: what their help says stands in ``options.toml``, declared once.

A command's function has its own as parameters. Those that it only hands on, in ``ctx.params``, are
of a set here, and its ``**`` argument takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.help import EVERY, HelpCommand
from vllm_memprof.files import read_table

#: Name of a parameter -> its type and its default.
Options = Mapping[str, tuple[Any, Any]]

_ROWS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("options.toml"))

LANG: Options = {"lang": (str, "en")}
WRITTEN: Options = {"format_name": (str, "table"), **LANG}
OUTPUT: Options = {**WRITTEN, "output": (Path | None, None)}
#: Of commands that show reports.
REPORTS: Options = {
    "full": (bool, False),
    "section": (list[str] | None, None),
    "names": (bool, False),
    **OUTPUT,
}
#: Of commands that start engines.
ENGINES: Options = {
    "model": (str, ...),
    "engine": (str, "vllm"),
    "device": (str, "auto"),
    "stack": (str | None, None),
    "python": (str | None, None),
    "startup_timeout": (float, 600.0),
    "quiet": (bool, False),
    **WRITTEN,
}
RANKS: Options = {"ranks": (str, "auto"), "rank": (int | None, None), "until": (str, "kv")}
#: Of commands that start one.
RUN: Options = {
    "run_dir": (Path | None, None),
    **ENGINES,
    "keep_secrets": (bool, False),
    "share_device": (bool, False),
}
#: Of commands that make many plans for one answer.
ANSWER: Options = {"run_dir": (Path | None, None), "no_cache": (bool, False), **ENGINES}

EPILOG = (
    "Every other argument goes to the engine unchanged and in order; `--` ends memprof's own. "
    "-q VALUE is vLLM's --quantization."
)


def with_options(
    function: Callable[..., None], command: str, options: Options | None = None
) -> Callable[..., None]:
    """Return the function of a command, its parameters described for Typer.

    Args:
        function: the command.
        command: its name, that of its table.
        options: that it has besides its parameters.
    """
    own = inspect.signature(function, eval_str=True).parameters.values()
    every = [each for each in own if each.kind is not each.VAR_KEYWORD] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in (options or {}).items()
    ]
    rows = {**_ROWS["shared"], **_ROWS.get(command, {})}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            each.replace(default=_described(each, dict(rows[each.name]), command))
            if each.name in rows
            else each
            for each in every
        ]
    )
    return function


def _described(parameter: inspect.Parameter, row: dict[str, Any], command: str) -> Any:
    """Return the option or argument of a parameter, as Typer has it for a default."""
    from vllm_memprof.engines import ENGINES as rows

    default = ... if parameter.default is parameter.empty else parameter.default
    row["help"] = row["help"].format(formats=", ".join(EVERY[command].formats),
                                     engines=", ".join(rows))  # fmt: skip
    if "completes" in row:
        row["autocompletion"] = getattr(complete, row.pop("completes"))
    if row.pop("argument", False):
        return typer.Argument(default, **row)
    flags = row.pop("flags", [f"--{parameter.name.replace('_', '-')}"])
    return typer.Option(default, *flags, **row)


def command_app(
    function: Callable[..., None], options: Options | None = None, **settings: Any
) -> typer.Typer:
    """Return the Typer app of one command.

    Args:
        function: the command; its name is that of the command.
        options: that it has besides its parameters.
        settings: of Typer's ``command``.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(function.__name__, **{"cls": HelpCommand, **settings})(
        with_options(function, function.__name__, options)
    )
    return app
