"""Writes ``docs/commands/*.md`` from the commands' own ``--help``, so that the pages cannot drift.

.venv/bin/python scripts/write_command_docs.py          rewrite the pages
.venv/bin/python scripts/write_command_docs.py --check  exit status 1 when a page differs
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "serve",
    "attach",
    "offline",
    "plan",
    "sweep",
    "explain",
    "report",
    "diff",
    "check",
    "doctor",
    "who",
    "sim",
    "sim setup",
    "sim list",
    "sim calibrate",
    "sim selftest",
)
FOLDER = Path(__file__).parent.parent / "docs" / "commands"


def help_text(command: str) -> str:
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-m", "vllm_memprof", *command.split(), "--help"]
    done = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def pages() -> dict[str, str]:
    """File name -> text, one page per command and an index."""
    made = {}
    index = ["# Commands", "", "Made from `--help` by `scripts/write_command_docs.py`.", ""]
    for command in COMMANDS:
        text = help_text(command)
        name = f"{command.replace(' ', '-')}.md"
        made[name] = f"# memprof {command}\n\n```text\n{text}\n```\n"
        index.append(f"- [`memprof {command}`]({name})")
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
