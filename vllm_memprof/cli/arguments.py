"""Split a command line into memprof's own options and the engine's arguments, order kept.

The parser under Typer can ignore unknown options, but it takes ``-tp 2`` for a cluster of ``-t``
and ``-p`` and moves options before values; the engine must get what was typed. So the tokens are
split here, by exact name:

* an option of memprof (``--device sim``, ``--device=sim``; ``_`` reads as ``-`` as in vLLM) is
  taken out;
* ``--`` ends memprof's options; it is dropped and what follows is the engine's, also where names
  are equal;
* everything else is the engine's, in its order. The first of it is MODEL (or ``--model X``
  anywhere, as in vLLM).

One name clashes: vLLM's ``-q`` is ``--quantization`` and takes a value. ``-q awq`` is therefore the
engine's; a ``-q`` that no value follows, which vLLM would refuse, is memprof's ``--quiet``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from vllm_memprof.cli.help import HelpCommand
from vllm_memprof.errors import MemprofError, UsageError, nearest
from vllm_memprof.text import plain

#: Key in the context's ``meta`` under which a command finds the engine's arguments.
ENGINE_ARGS = "vllm_memprof.engine_args"
#: Of 221 options of vLLM none is as like one of memprof's.
_ALIKE = 0.87


@dataclass(frozen=True)
class SplitArguments:
    own: list[str]  # normalised: "--name=value", "-nvalue" or "--flag"
    model: str | None
    engine: list[str]  # without MODEL, unchanged and in order


def split_arguments(args: list[str], options: Mapping[str, bool]) -> SplitArguments:
    """Split the tokens of a command.

    Args:
        args: the tokens.
        options: names of memprof's options -> whether a value follows.

    Raises:
        UsageError: an option of memprof lacks its value, or a flag was given one.
    """
    own: list[str] = []
    engine: list[str] = []
    rest = list(args)
    while rest:
        token = rest.pop(0)
        if token == "--":
            engine += rest
            break
        name, equals, value = token.partition("=")
        takes_value = options.get(_normalise(name))
        if takes_value is None or (token == "-q" and rest and not rest[0].startswith("-")):
            engine.append(token)
        elif not takes_value:
            if equals and name.startswith("--help"):
                engine.append(token)  # vLLM's --help=<group>
            elif equals:
                raise UsageError(f"{name} takes no value, got {value!r}")
            else:
                own.append(_normalise(name))
        else:
            if not equals:
                if not rest or (rest[0].startswith("-") and rest[0] != "-"):
                    found = f", got the option {rest[0]!r}" if rest else ""
                    hint = f"for a value that begins with '-' write {name}=VALUE"
                    raise UsageError(f"{name} needs a value{found}", hint=hint)
                value = rest.pop(0)
            joint = "=" if name.startswith("--") else ""  # -o=DIR would be a folder named =DIR
            own.append(f"{_normalise(name)}{joint}{value}")
    model, engine = take_model(engine)
    return SplitArguments(own, model, engine)


def _normalise(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def take_model(engine: list[str]) -> tuple[str | None, list[str]]:
    """Return MODEL and the rest: the first token, or ``--model X`` wherever it stands.

    A command that was pasted whole begins with ``vllm serve``.
    """
    engine = engine[2:] if engine[:2] == ["vllm", "serve"] else engine
    if engine and not engine[0].startswith("-"):
        return engine[0], engine[1:]
    for index, token in enumerate(engine):
        name, equals, value = token.partition("=")
        given = [value] if equals else engine[index + 1 : index + 2]
        if name == "--model" and given:
            return given[0], engine[:index] + engine[index + (1 if equals else 2) :]
    return None, engine


class EngineCommand(HelpCommand):
    """A command whose unknown arguments are the engine's: found in ``ctx.meta[ENGINE_ARGS]``."""

    def split(self, ctx: Any, args: list[str]) -> SplitArguments:
        """Split tokens by the options of this command."""
        options = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        try:
            return split_arguments(args, options)
        except UsageError:
            if not ctx.resilient_parsing:
                raise
            return SplitArguments([], None, [])  # a shell completes the value that is missing

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if it fails, name options of memprof that the engine's are like."""
        try:
            return super().invoke(ctx)
        except (MemprofError, typer.Exit) as end:
            own = [name for param in self.params for name in param.opts]
            for word in ctx.meta[ENGINE_ARGS] if end.exit_code else ():
                for near in nearest(word.partition("=")[0], own, 1, _ALIKE):
                    told = f"memprof: {word} went to the engine; did you mean {near}?"
                    typer.echo(plain(told), err=True)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[ENGINE ARGUMENTS]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        split = self.split(ctx, args)
        ctx.meta[ENGINE_ARGS] = split.engine
        wants_help = any(name in split.own for name in ctx.help_option_names)
        if split.model is None and not wants_help and not ctx.resilient_parsing:
            hint = f"{ctx.command_path} MODEL [options of memprof and of vLLM in any order]"
            if "-q" in args:
                hint = "`-q VALUE` is vLLM's --quantization; write --quiet, or put -q after MODEL"
            raise UsageError("MODEL is missing", hint=hint)
        tail = [] if split.model is None else ["--", split.model]
        return super().parse_args(ctx, [*split.own, *tail])
