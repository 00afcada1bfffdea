"""Plan every command that a documentation types, as it stands, on a simulated device.

``python -m scripts.documented_commands DOCS`` reads the pages of a folder (vllm-ascend's is
``docs/source``), takes each ``vllm serve`` of their blocks of code with the variables that the
block sets, and plans a rank of it: host and port aside, eagerly unless ``--graphs``. Nothing of a
page is run. ``tests/data/documented_commands.json`` keeps what came out: page, line, model, outcome
and its reason; a command that it has is planned again with ``--again`` alone. A model that is only
named by a placeholder, one without a preset, and a device without a profile are counted as such.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_memprof.cli.arguments import take_model
from vllm_memprof.options import options
from vllm_memprof.sim.presets import find_preset

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/data/documented_commands.json"
SERVER = "vllm.entrypoints.openai.api_server"
TIMEOUT_S = 420.0
#: Where a command ends and the shell goes on.
_ENDS = re.compile(r"[|&;]|\d?>|<<")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_TAB = re.compile(r"\s*:{3,}\s*(?:\{tab-item\}\s*(.*))?$")
#: Words of a page's path, or of the heading and tab above a command -> profile; "" is none.
_DEVICES = ((r"950|\bA5\b", ""), ("310|300I", "310p"), (r"\bA2\b|910B", "910b"), ("", "a3"))
_ASSIGNED = re.compile(r"(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
#: What a page leaves to its reader, and what does not bear on memory.
_PLACEHOLDER = re.compile(
    r"^$|(?i:^(?:serve|model)$|model_?path|_model$|model[-_]file|path/to/(?:your/|target/)?model)"
)
_ASIDE = ("--host", "--port")
#: Variables of a page that the machine of a plan does not have, or that choose its devices.
_LEFT_OUT = re.compile(
    "LD_|PYTHONPATH|PATH$|ASCEND_RT_VISIBLE|.*_IFNAME|.*_IP$|VLLM_USE_MODELSCOPE"
)


@dataclass(frozen=True)
class Command:
    """A command of a page: its line counts from 1, words are those behind ``serve``."""

    page: str
    line: int
    words: tuple[str, ...]
    env: Mapping[str, str]
    under: str = ""  # heading and tab

    @property
    def device(self) -> str:
        """The device profile; "" for a device that has none."""
        where = f"{self.page} {self.under}"
        return next(profile for words, profile in _DEVICES if re.search(words, where))

    @property
    def model(self) -> str:
        """The model, as the page names it."""
        return take_model(list(self.words))[0] or ""


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of a page."""
    block: list[str] | None = None
    begin, fence, indent, heading, tab = 0, "", 0, "", ""
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if match and block is None:
            block, begin, fence = [], number, match[1]
            indent = len(line) - len(line.lstrip())
        elif match and line.strip() == fence and block is not None:
            under = f"{heading} {tab}"
            yield from (replace(each, under=under) for each in _of_block(page, begin + 1, block))
            block = None
        elif block is not None:
            block.append(line[indent:])
        elif line.startswith("#"):
            heading = line
        elif named := _TAB.match(line):
            tab = named[1] or ""


def _of_block(page: str, first: int, lines: Iterable[str]) -> Iterator[Command]:
    env: dict[str, str] = {}
    held, begin = "", first
    for number, line in enumerate(lines, first):
        begin = begin if held else number
        held += f"{line}\n"
        if line.rstrip().endswith("\\"):
            continue
        try:
            words = shlex.split(re.sub(r"\\\s*\n", " ", held), comments=True)
        except ValueError:  # a quotation goes on
            continue
        held = ""
        words = [_VARIABLE.sub(lambda m: env.get(m[1], m[0]), word) for word in words]
        start = next((at for at, word in enumerate(words) if not _set(word, env)), len(words))
        for at in range(start, len(words)):
            if words[at] == SERVER or words[at - 1 : at + 1] == ["vllm", "serve"]:
                rest = words[at + 1 :]
                end = next((i for i, word in enumerate(rest) if _ENDS.match(word)), len(rest))
                yield Command(page, begin, tuple(rest[:end]), dict(env))


def _set(word: str, env: dict[str, str]) -> bool:
    """Take a variable that a word sets; return whether it was one, or ``export``."""
    match = _ASSIGNED.fullmatch(word)
    if match:
        env[match[1]] = match[2]
    return match is not None or word == "export"


def plan(command: Command, stack: str, extra: Iterable[str] = ()) -> dict[str, str]:
    """Plan a command; return its outcome and the reason: planned, or how it failed."""
    given = [w for name, held in options(command.words) if name not in _ASIDE for w in held]
    env = {name: value for name, value in command.env.items() if not _LEFT_OUT.match(name)}
    with tempfile.TemporaryDirectory(prefix="memprof-documented-") as folder:
        run_dir = Path(folder, "run")
        own = ["--device", f"sim:{command.device}", "--stack", stack, "--ranks", "one"]
        argv = [
            sys.executable,
            "-m",
            "vllm_memprof",
            "plan",
            *own,
            "--run-dir",
            str(run_dir),
            *given,
            *extra,
        ]
        try:
            done = subprocess.run(
                argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "no end", "reason": f"{TIMEOUT_S:g} s"}
        if not done.returncode:
            return {"outcome": "planned", "reason": ""}
        try:
            report = json.loads((run_dir / "report.json").read_text("utf-8"))
        except OSError:
            return {"outcome": "refused", "reason": done.stderr.strip()[:200]}
    failure = report.get("failure") or {}
    reason = " ".join((report["run"].get("exit_reason") or "").split()).rpartition("reported: ")[2]
    return {"outcome": failure.get("title") or "failed", "reason": reason[:200]}


def outcome_of(command: Command, stack: str, extra: Iterable[str]) -> dict[str, str]:
    """Return what comes out of a command, without a plan where there is nothing to plan."""
    given = [(n, held) for n, held in options(command.words) if n not in _ASIDE]
    empty = (held == [n] and n.endswith(("-size", "-address", "-rank")) for n, held in given)
    open_words = (word for _, held in given for word in held if re.search(r"\$[\w{]|^<", word))
    if _PLACEHOLDER.search(command.model) or any(empty) or any(open_words):
        return {"outcome": "placeholder", "reason": ""}
    if not command.device:
        return {"outcome": "no device profile", "reason": ""}
    if find_preset(command.model) is None:
        return {"outcome": "no preset", "reason": ""}
    return plan(command, stack, extra)


def main(argv: list[str] | None = None) -> int:
    """Plan the commands that the table does not have, and write it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("docs", type=Path, help="folder with pages")
    parser.add_argument("--stack", default="vllm-ascend-0.23.0")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="of page and model")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--graphs", action="store_true", help="with graphs where the page has them")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(argv)
    rows = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else []
    kept = {(row["stack"], row["page"], row["line"]): row for row in rows}
    found: dict[tuple[str, ...], Command] = {}  # the same words once, where they stand first
    for path in sorted(asked.docs.rglob("*.md")):
        page = path.relative_to(asked.docs).as_posix()
        for command in commands_of(page, path.read_text("utf-8")):
            found.setdefault(command.words, command)
    todo = [
        each
        for each in found.values()
        if asked.only.search(f"{each.page} {each.model}")
        and (asked.again or (asked.stack, each.page, each.line) not in kept)
    ]
    extra = () if asked.graphs else ("--enforce-eager",)
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = pool.map(lambda each: outcome_of(each, asked.stack, extra), todo)
        for command, result in zip(todo, results, strict=True):
            key = (asked.stack, command.page, command.line)
            own = {"stack": key[0], "page": key[1], "line": key[2], "model": command.model}
            kept[key] = {**own, **result}
            print(command.page, command.line, command.model, *result.values(), flush=True)
            table = [json.dumps(kept[key], ensure_ascii=False) for key in sorted(kept)]
            TABLE.write_text("[\n" + ",\n".join(table) + "\n]\n", encoding="utf-8")
    counted = Counter(row["outcome"] for row in kept.values() if row["stack"] == asked.stack)
    for outcome, count in counted.most_common():
        print(f"{count:5} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
