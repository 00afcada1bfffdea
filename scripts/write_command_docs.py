"""Writes ``docs/commands/*.md`` from the commands' own ``--help-all``, so that none drifts.

.venv/bin/python scripts/write_command_docs.py          rewrite the pages
.venv/bin/python scripts/write_command_docs.py --check  exit status 1 when a page differs
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from vllm_memprof.cli import app
from vllm_memprof.cli.help import EVERY

FOLDER = Path(__file__).parent.parent / "docs" / "commands"


#: Options of several commands, on the page of all commands alone.
SHARED = {
    "--engine", "--device", "--run-dir", "--lang", "--quiet", "--startup-timeout", "--python",
    "--stack", "--keep-secrets", "--share-device", "--ranks", "--rank", "--until",
    "--help",
}  # fmt: skip


COMPLETION = """\
`memprof --install-completion` installs completion of commands, options, devices, stacks, model
presets and runs for the shell in use (bash, zsh, fish); `--show-completion` prints the script. bash
completes behind a colon (`sim:910b`) after `COMP_WORDBREAKS=${COMP_WORDBREAKS//:}`.""".splitlines()


def help_text(command: str, shared: bool = False) -> str:
    """Return the whole help of a command, without the shared options, or them alone."""
    found: Any = typer.main.get_command(app)
    context = typer.Context(found, info_name="memprof")
    for name in command.split():
        found = found.get_command(context, name)
        context = typer.Context(found, info_name=name, parent=context, max_content_width=100)
    context.terminal_width = 100
    found.every_option = True
    for param in found.get_params(context):
        if (not SHARED.isdisjoint(param.opts)) != shared:
            param.hidden = True
    text = context.get_help()
    if shared:
        text = text.partition("Options:\n")[2].partition("\n\n")[0]
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def pages() -> dict[str, str]:
    """File name -> text, one page per command and an index."""
    made = {}
    index = ["# Commands", "", "Made from `--help-all` by `scripts/write_command_docs.py`.", ""]
    for command in EVERY:
        text = help_text(command)
        name = f"{command.replace(' ', '-')}.md"
        made[name] = f"# memprof {command}\n\n```text\n{text}\n```\n"
        index.append(f"- [`memprof {command}`]({name})")
    index += ["", "Options of commands that start an engine, where they have them:", "", "```text"]
    index += [help_text("plan", shared=True), "```"]
    index += ["", *COMPLETION]
    made["README.md"] = "\n".join(index) + "\n"
    return made


def main() -> int:
    wrong = []
    for name, text in pages().items():
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
