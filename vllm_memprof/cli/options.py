"""Options of the commands: what their help says stands in ``options.toml``, declared once.

A command's function has its own as parameters. Those that it only hands on, in ``ctx.params``, are
of a set here, and its ``**`` argument takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.help import EVERY, HelpCommand
from vllm_memprof.engines import ENGINES as ENGINE_ROWS
from vllm_memprof.files import read_own
from vllm_memprof.launch.request import LaunchRequest

#: Name of a parameter -> its type and its default.
Options = Mapping[str, tuple[Any, Any]]

_ROWS: dict[str, dict[str, Any]] = read_own(__file__, "options.toml")


def of_request(*names: str) -> Options:
    """Return the options of those names, with the types and defaults of a ``LaunchRequest``."""
    hints, found = get_type_hints(LaunchRequest), dict[str, tuple[Any, Any]]()
    for field in fields(LaunchRequest):
        if field.name in names:
            listed = field.default_factory is not MISSING
            found[field.name] = hints[field.name], [] if listed else field.default
    return found


WRITTEN: Options = {"format_name": (str, "table"), "lang": (str, "en")}
OUTPUT: Options = {**WRITTEN, "output": (Path | None, None)}
#: Of commands that show reports.
REPORTS: Options = {
    "full": (bool, False),
    "section": (list[str] | None, None),
    "names": (bool, False),
    "prove": (bool, False),
    "device": (str | None, None),
    **OUTPUT,
}
#: Of commands that start engines.
ENGINES: Options = {
    "model": (str, ...),
    "device": (str, "auto"),
    **of_request("engine", "stack", "python", "startup_timeout", "quiet"),
    **WRITTEN,
}
RANKS = of_request("ranks", "rank", "until")
#: Of commands that start one.
RUN: Options = {
    **of_request("run_dir", "keep_secrets", "share_device"),
    "use_checked": (str | None, None),
    **ENGINES,
}
#: Of commands that make many plans for one answer.
ANSWER: Options = {**of_request("run_dir"), "no_cache": (bool, False), **ENGINES}


def with_options(
    function: Callable[..., None], command: str, options: Options | None
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
    default = ... if parameter.default is parameter.empty else parameter.default
    row["help"] = row["help"].format(formats=", ".join(EVERY[command].formats),
                                     engines=", ".join(ENGINE_ROWS))  # fmt: skip
    if "completes" in row:
        row["autocompletion"] = getattr(complete, row.pop("completes"))
    if row.pop("argument", False):
        return typer.Argument(default, **row)
    flags = row.pop("flags", [f"--{parameter.name.replace('_', '-')}"])
    return typer.Option(default, *flags, **row)


def command_app(
    function: Callable[..., None],
    options: Options | None = None,
    cls: type[HelpCommand] | None = None,
) -> typer.Typer:
    """Return the Typer app of one command.

    Args:
        function: the command; its name is that of the command.
        options: that it has besides its parameters.
        cls: of the command; default: by whether it starts engines.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    engines, name = "model" in (options or ()), function.__name__
    cls = cls or (EngineCommand if engines else HelpCommand)
    epilogs = _ROWS["epilogs"]
    epilog = epilogs.get(name, epilogs["engines"]) if engines else None
    command = app.command(name, cls=cls, epilog=epilog)
    command(with_options(function, name, options))
    return app
