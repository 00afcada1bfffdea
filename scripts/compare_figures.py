"""Compare the figures that two revisions print of the same runs: ``compare_figures.py BASE``.

The revision BASE and the working tree report the run folders and logs of the tree's ``tests/data``
through their command line, in every format; where it has ``--full``, the whole report. JSON and
csv are compared by path. Texts are compared by the values of their numbers: one that is there less
often is lost, one that is there more often is new, and what changed is both. A size in bytes is
not lost where it stands in GiB. What has digits and is no figure is in ``WORDS``. A rename or a
move is declared in ``RENAMED`` and ``MOVED``, what is meant to differ in ``EXPECTED``; added keys
are no difference.

Exit status 0: no figure differs but the expected ones. 1: some do, and are listed.
"""

from __future__ import annotations

import contextlib
import csv
import html
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: Names that changed -> names of the working tree; applied to every word of a path, on both sides.
RENAMED = {
    "honest_kv_cache_bytes": "fits_request_bytes",
    "honest_kv_cache": "fits_request",
    "honest_kv_tokens": "fits_request_tokens",
    "honest_tokens": "fits_request_tokens",
    "spare": "headroom",
    "spare_bytes": "headroom_bytes",
    "released_spare_bytes": "released_headroom_bytes",
    "own_bytes": "bytes",
    "uncharged": "not_subtracted",
    "charged_bytes": "subtracted_bytes",
    "cached": "reserved_not_allocated",
}
#: Paths that changed, in this order: a pattern and what takes its place; None: not compared.
MOVED: tuple[tuple[str, str | None], ...] = (
    (r"\bempty_cache_summary\b", "reclaim"),
    (r"\brequested_exact$", "requested"),
    (r"\breclaim\.(seconds|freed_\w+|refilled_bytes)\b", r"reclaim.engine.\1"),
    (r"\breclaim\.serving_(\w+)$", r"reclaim.serving.\1"),
    (r"\breclaim\.(calls_at_end|own\b.*)$", None),
    (r"\bnum_gpu_blocks_override$", "override_blocks"),
    # of a comparison, which had an object per figure with one key per run
    (r"phases\[[^]]*\]\.phase$", None),
    (r"device_memory\[((?:before|after),[^]]*)\]", r"owners[\1]"),
    (r"(phases\[[^]]*\])\.after\.(\w+)\.([ab])$", r"\1.\3.\2"),
    (r"(phases\[[^]]*\])\.(count|seconds)\.([ab])$", r"\1.\3_\2"),
    (r"\.kv_cache_bytes\.([ab])$", r".\1_granted"),
    (r"\.kv_cache_bytes\.difference$", ".difference_bytes"),
    (r"\.equation\.([ab])$", r".\1_equation"),
    (r"^kv_tokens\.([ab])$", r"\1_kv_tokens"),
    (r"^kv_tokens\.difference$", "difference_tokens"),
    (r"^findings\.only_([ab])\b", r"\1_findings"),
    (r"device_memory\[[^]]*\]\.order$", None),  # of the phase that the owners lie in
    (r"device_memory\[(-?\d+),(\w+)\]\.rows\b", r"phases[\1].\2.owners"),
    (r"device_memory\[(-?\d+),(\w+)\]", r"phases[\1].\2"),
    (
        r"(phases\[[^]]*\])\.(before|after)\.(parts|unexplained_bytes|unexplained_how)",
        r"\1.owners.\2.\3",
    ),
    (r"(phases\[[^]]*\])\.(before|after)\.owners", r"\1.owners.\2.rows"),
    (r"^with\b", "corrected"),  # of a calibrated profile
    (r"'initial_non_torch', 'other_processes_at_start'", "'initial_non_torch'"),  # of one cause
)
#: Differences that are meant: pattern of the document, pattern of the path, or of ``lost NUMBER``
#: or ``new NUMBER``, reason. What is declared new hides no change: of that a number is lost too.
EXPECTED: tuple[tuple[str, str, str], ...] = (
    (
        r"^diff recorded_013_tp2 recorded_023_tp2 (table|markdown)",
        r"^lost \+?(0\.7254|10564|778882252)$"
        r"|^new \+?(0\.3754|0\.3500|0|5467|5097|403072614|375809638)$",
        NEIGHBOUR := "memory of other processes at the start is a cause of its own",
    ),
    (
        r"^diff recorded_013_tp2 recorded_023_tp2 json",
        r"causes\[\['initial_non_torch'\]\]",
        NEIGHBOUR,
    ),
    (
        r"^diff .* (table\d+|markdown)",
        r"^new ([+-](0\.25|0\.60|0\.95|3\.95|11\.87)|0)$",
        "the title of the causes has the difference that they add up to",
    ),
    (
        r"^diff .* (table\d+|markdown)",
        r"^new ([+-]\d+\.\d|0)$",
        "a column has what each cause is of the KV cache, in %",
    ),
    (
        r"^diff .* table(80|120)",
        r"^lost 0$",
        "bytes beside GiB are shown from 140 columns on; other sizes are compared in GiB",
    ),
    (
        r" html$",
        r"^new ",
        "the page has a first look and a legend at its bar; tables and JSON have the same figures",
    ),
    (
        r"^diff .* (table\d+|markdown)",
        r"^new (3\.54|3\.63|3\.93|64)$",
        "the first lines say which run is over its device at the serving peak",
    ),
    (
        r"^report recorded_oom_image ",
        r"^lost (0\.0160|3611801641)$|remedies\[[^]]*3611801641",
        "of two --kv-cache-memory-bytes the one that leaves room for the serving peak is offered",
    ),
    (
        r"ascend-19\.log json",
        r"remedies\[end what else is on device [46], or take another one\]",
        "a remedy has other words, by which it is found; its bytes stand in the table",
    ),
    (
        r"killed_tp2 (json|csv)",
        r"initial_non_torch",
        "known from the first reading, as diff knew it: report and diff read one table",
    ),
)

#: List of JSON -> what names an element; other lists count.
KEYS = {
    **dict.fromkeys(("rows", "owners", "parts"), ("edge", "component", "part_of")),
    **dict.fromkeys(("terms", "not_subtracted", "uncharged"), ("name",)),
    "ranks": ("label",),
    "remedies": ("argument",),
    "phases": ("order",),
    "device_memory": ("order", "edge", "component"),
    "findings": ("id", "label"),
    "causes": ("names",),
    "traceEvents": ("ph", "pid", "name", "ts"),
}
#: Keys whose numbers are versions and places, not figures.
NO_FIGURE = {"schema", "cite"}
#: The same in texts, and other words with a digit.
WORDS = (
    # a line of code, which a column may cut behind the colon or in the number
    r"\.py:(?= )([^\n]*\n)([^\n]*?  )\d+(?=  | *$)",
    r"\.py:\d*([^\n]*)(?:\n +\d+ *$)?",
    r"(?<![\w.])\d+\.\d+\.\d[\w.]*",  # a release
    r"\((?:vllm|vllm-ascend|sglang)\s+[\d.]+\+\)",  # the first of an equation
    r"worker\s+\d+\s+of\s+\d+|\d+\s+ranks\s+alike",  # ranks
    r"lines?\s+\d+(?:(?:-|\s+to\s+)\d+)?",  # of a log
    r"below\s+0:\s+does\s+not\s+fit",
    r"<summary>\d+ rows</summary>",  # of a table that is folded
)

DIFFS = (
    ("recorded_013_tp2", "recorded_023_tp2"),
    ("logs/two_methods_910b_tp2.md#2", "logs/two_methods_910b_tp2.md#3"),
    ("skewed_tp2", "graph_tp2"),
    ("killed_tp2", "plan_tp2"),
    ("recorded_tp1", "recorded_tp2"),
)
CHECKS = (
    ("check", "graph_tp2", "--budget", "budgets/passed.toml"),
    ("check", "skewed_tp2", "--budget", "budgets/guard.toml", "--baseline", "eager_tp2"),
    ("check", "logs/recorded_tp2_0.23.0.log", "--budget", "budgets/log.toml"),
    ("check", "recorded_killed_tp2", "--budget", "budgets/passed.toml"),
)


class Case(NamedTuple):
    """One command line and the document that it prints."""

    args: tuple[str, ...]
    format: str
    width: int = 120

    @property
    def name(self) -> str:
        return f"{' '.join(self.args)} {self.format}{self.width if self.format == 'table' else ''}"


def cases(data: Path) -> Iterator[Case]:
    """Every document of the run folders and logs below ``data``, in a fixed order."""
    runs = (("report", path.parent.name) for path in sorted(data.glob("*/run.json")))
    logs = (("explain", f"logs/{path.name}") for path in sorted(data.glob("logs/*.[lm]*")))
    formats = {"report": ("csv", "trace", "html"), "explain": ("csv", "html"), "check": ("github",)}
    for args in (*runs, *logs, *(("diff", *each) for each in DIFFS), *CHECKS):
        yield from (Case(args, "table", width) for width in (80, 120, 200))
        yield from (Case(args, each) for each in ("markdown", "json", *formats.get(args[0], ())))


def print_all(target: Path) -> None:
    """Run every case on the current folder; write what each prints below ``target``."""
    os.environ.update(TERM="xterm", NO_COLOR="1")
    full = importlib.util.find_spec("vllm_memprof.report.documents.first_screen") is not None
    for number, case in enumerate(cases(Path())):
        out = io.StringIO()
        out.isatty = lambda table=case.format == "table": table  # a terminal, of COLUMNS columns
        os.environ["COLUMNS"] = str(case.width)
        whole = ["--full"] if full and case.args[0] in ("report", "explain") else []
        sys.argv = ["memprof", *case.args, *whole, "--format", case.format]
        status: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                runpy.run_module("vllm_memprof", run_name="__main__")
            except SystemExit as ended:
                status = ended.code
        text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
        (target / str(number)).write_text(f"{status}\n{text}")


NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?")


def numbers(text: str) -> Counter[str]:
    """The numbers of a text with sign and decimals, and how often each is there; 0 in one form."""
    text = text.replace("\\", "")
    for word in WORDS:
        text = re.sub(word, lambda found: " ".join(found.groups()) or " ", text, flags=re.M)
    found = (each.replace("−", "-").replace(",", "") for each in NUMBER.findall(text))
    return Counter("0" if float(each) == 0 else each for each in found)


def in_gib(number: str) -> str | None:
    """A size in bytes as tables show it in GiB; None for what is no such number."""
    size = int(number) / (1 << 30) if re.fullmatch(r"[+-]?\d{7,}", number) else None
    return None if size is None else f"{size:{'+' if number[0] in '+-' else ''}.4f}"


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every figure of a JSON document by its path; the numbers of a sentence as text, in order."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in NO_FIGURE:
                yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        names = KEYS.get(path.rsplit(".", 1)[-1], ())
        seen: Counter[str] = Counter()
        for i, item in enumerate(value):
            name = str(i)
            if names and isinstance(item, Mapping):
                name = ",".join(str(item[key]) for key in names if item.get(key) is not None)
            seen[name] += 1
            again = f"#{seen[name]}" if seen[name] > 1 else ""
            yield from flat(item, f"{path}[{name}{again}]")
    elif isinstance(value, str):
        if found := numbers(value):
            yield path, " ".join(sorted(found.elements()))
    elif not isinstance(value, bool):
        yield path, value


def rows(text: str) -> Iterator[tuple[str, object]]:
    """The figures of a csv by run, label, order, edge, kind, component and owner."""
    named = ("run", "label", "order", "edge", "kind", "component", "part_of")
    seen: Counter[str] = Counter()
    for row in csv.DictReader(io.StringIO(text)):
        path = ",".join(row.get(name) or "" for name in named)
        seen[path] += 1
        for column in ("bytes", "seconds"):
            yield f"[{path}#{seen[path]}].{column}", row.get(column) or None


def by_path(figures: Iterator[tuple[str, object]]) -> dict[str, object]:
    """The same under the names and places of the working tree."""
    found = {}
    for path, value in figures:
        for pattern, to in MOVED:
            if re.search(pattern, path):
                path = "" if to is None else re.sub(pattern, to, path)
        if path:
            found[re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), path)] = value
    return found


def figures(case: Case, text: str) -> dict[str, object] | Counter[str]:
    """By path where the document has paths, else the numbers and how often each is there."""
    if case.format in ("json", "trace") and text:
        return by_path(flat(json.loads(text)))
    if case.format == "csv":
        return by_path(rows(text))
    if case.format == "html":
        blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
        page = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.S)
        return numbers(html.unescape(re.sub(r"<[^>]*>", " ", page)) + "".join(blocks))
    return numbers(text)


def differences(case: Case, base: str, tree: str) -> Iterator[tuple[str, str]]:
    """Path or number, and how it differs."""
    (base_status, _, base_text), (status, _, text) = base.partition("\n"), tree.partition("\n")
    if base_status != status:
        yield "exit status", f"{base_status} -> {status}"
        return
    before, after = figures(case, base_text), figures(case, text)
    if isinstance(before, Counter) and isinstance(after, Counter):
        lost, new = before - after, after - before
        for number in list(lost):
            if (gib := in_gib(number)) in after:
                new[gib] -= min(new[gib], lost.pop(number))
        for what, counts in (("lost", lost), ("new", +new)):
            for number in sorted(counts):
                yield f"{what} {number}", f"{before[number]} times -> {after[number]} times"
        return
    for path, value in before.items():
        if value is not None and path not in after:
            yield path, f"{value} -> not there"
        elif path in after and after[path] != value:
            yield path, f"{value} -> {after[path]}"


def compare(base_outputs: Path, tree_outputs: Path, data: Path) -> int:
    """Print the differences, equal ones of several documents once; return how many there are."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    expected: Counter[str] = Counter()
    for number, case in enumerate(cases(data)):
        base, tree = ((side / str(number)).read_text() for side in (base_outputs, tree_outputs))
        for what, how in differences(case, base, tree):
            for document, figure, reason in EXPECTED:
                if re.search(document, case.name) and re.search(figure, what):
                    expected[reason] += 1
                    break
            else:
                found[what, how].append(case.name)
    for (what, how), where in sorted(found.items()):
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        print(f"{what}: {how}\n    {where[0]}{more}")
    for reason, count in expected.items():
        print(f"expected, {count} figures: {reason}")
    count = sum(map(len, found.values()))
    print(f"{number + 1} documents compared, {count} figures differ that should not")
    return count


def main(base_revision: str) -> int:
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="memprof-figures-") as place:
        base, outputs = Path(place, "base"), [Path(place, "base.out"), Path(place, "tree.out")]
        data = ROOT / "tests" / "data"
        subprocess.run([*git, "add", "--quiet", "--detach", str(base), base_revision], check=True)
        try:
            running = []
            for tree, target in zip((base, ROOT), outputs, strict=True):
                target.mkdir()
                command = [sys.executable, __file__, "--print-all", str(target)]
                env = {**os.environ, "PYTHONPATH": str(tree)}
                running.append(subprocess.Popen(command, cwd=data, env=env))
            if sum(process.wait() for process in running):
                return 2
            return int(compare(*outputs, data) > 0)
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print-all"]:
        print_all(Path(sys.argv[2]))
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
