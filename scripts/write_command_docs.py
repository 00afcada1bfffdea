"""Writes ``docs/commands/*.md`` from the commands' own ``--help-all``, so that none drifts.

.venv/bin/python scripts/write_command_docs.py          rewrite the pages
.venv/bin/python scripts/write_command_docs.py --check  exit status 1 when a page differs
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

import typer

from vllm_memprof.cli import app
from vllm_memprof.cli.help import EVERY

FOLDER = Path(__file__).parent.parent / "docs" / "commands"


#: Commands that must have an option or argument before the page of all commands describes it.
SHARED_BY = 3
REST = """\
Every argument of a command with MODEL that memprof does not know goes to the engine unchanged and
in order; `--` ends memprof's own. `-q VALUE` is vLLM's `--quantization`.

`memprof --install-completion` installs completion for the shell in use (bash, zsh, fish);
`--show-completion` prints the script. bash completes behind a colon (`sim:910b`) after
`COMP_WORDBREAKS=${COMP_WORDBREAKS//:}`."""


def command_of(name: str) -> tuple[Any, typer.Context]:
    """Return a command and the context of its help."""
    found: Any = typer.main.get_command(app)
    context = typer.Context(found, info_name="memprof")
    for word in name.split():
        found = found.get_command(context, word)
        context = typer.Context(found, info_name=word, parent=context, max_content_width=100)
    context.terminal_width = 100
    return found, context


def described(param: Any) -> tuple[str, str | None]:
    """Return what tells an option or argument from others: its spelling and its help."""
    return "/".join([*param.opts, param.param_type_name]), getattr(param, "help", None)


def shared() -> dict[tuple[str, str | None], tuple[str, str]]:
    """Return what several commands have, with the two columns of its help."""
    records, count = {}, Counter[tuple[str, str | None]]()
    for name in EVERY:
        found, context = command_of(name)
        for param in found.get_params(context):
            if (record := param.get_help_record(context)) is not None:
                records.setdefault(described(param), record)
                count[described(param)] += 1
    return {each: record for each, record in records.items() if count[each] >= SHARED_BY}


def help_text(name: str, common: Container[tuple[str, str | None]]) -> str:
    """Return the whole help of a command, without what it shares with others."""
    found, context = command_of(name)
    found.every_option, found.epilog = True, None
    for param in found.get_params(context):
        param.hidden = param.hidden or described(param) in common
    return "\n".join(line.rstrip() for line in context.get_help().strip("\n").splitlines())


def pages() -> dict[str, str]:
    """File name -> text, one page per command and an index."""
    made, common = dict[str, str](), shared()
    index = ["# Commands", "", "Made from `--help-all` by `scripts/write_command_docs.py`.", ""]
    for command in EVERY:
        name = f"{command.split()[0]}.md"
        if name not in made:
            index.append(f"- [`memprof {command}`]({name})")
        text = f"# memprof {command}\n\n```text\n{help_text(command, common)}\n```\n"
        made[name] = f"{made[name]}\n#{text}" if name in made else text
    index += ["", "What three or more commands have; their pages do not repeat it:", "", "```text"]
    formatter = typer.Context(typer.main.get_command(app), max_content_width=100).make_formatter()
    formatter.width = 100
    formatter.write_dl([*common.values()])
    index += [formatter.getvalue().rstrip(), "```", "", REST]
    made["README.md"] = "\n".join(index) + "\n"
    return made


def main() -> int:
    """Write or compare the pages; return the exit status."""
    made = pages()
    wrong = [path.name for path in FOLDER.glob("*.md") if path.name not in made]
    for name, text in made.items():
        path = FOLDER / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.append(name)
    if wrong:
        print(
            f"docs/commands: {', '.join(wrong)} differ from --help: run "
            f"scripts/write_command_docs.py"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
