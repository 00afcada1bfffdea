"""Pages of the docs against the tree: generated pages, links, lines, names, headings of reports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import leaking, traced
from tests.unit.accounting.test_requests import vision
from tests.unit.report.test_requests import many as requests_by_hand
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.document import check_document
from vllm_memprof.check.limits import KEYS, LimitKey
from vllm_memprof.check.outcomes import CheckResult, check_report
from vllm_memprof.cli.show import draw
from vllm_memprof.compare.diff import Diff, diff_reports
from vllm_memprof.compare.document import diff_document
from vllm_memprof.document import Document, Section
from vllm_memprof.report.documents import document
from vllm_memprof.sources import read_report, read_reports
from vllm_memprof.text import Text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = ROOT / "tests" / "data"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
#: Pages that lead through the tree, and so name it.
GUIDES = [DOCS / "develop/add-a-figure.md", DOCS / "develop/from-byte-to-table.md"]
WIDTH = 100


# --- generated pages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        ["scripts/write_command_docs.py"],
        ["-m", "tests.support.write_findings_docs"],
        ["-m", "scripts.write_causes_docs"],
        ["-m", "scripts.bench_plan"],  # the page of models
        ["-m", "scripts.accuracy"],
    ],
    ids=lambda script: script[-1],
)
def test_generated_pages_are_current(script: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- links and lines ------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_at_most_100_wide(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    wide = [line for line in prose.splitlines() if len(line) > WIDTH and line[0] not in "|["]
    assert wide == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = [*DOCS.glob("*.md"), *DOCS.glob("concepts/*.md"), *DOCS.glob("develop/**/*.md")]
    found = {str(page.relative_to(DOCS)) for page in pages} - {"README.md"}
    assert {page for page in found if f"({page})" not in index} == set()


def test_every_package_has_a_short_readme() -> None:
    packages = [each.parent for each in (ROOT / "vllm_memprof").glob("*/__init__.py")]
    assert len(packages) > 10
    for package in packages:
        lines = (package / "README.md").read_text().splitlines()
        assert len(lines) <= 10, package.name
        assert max(map(len, lines)) <= WIDTH, package.name


# --- names of the tree ----------------------------------------------------------------------------


def symbols(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that a module or class defines, with dots for members."""
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            yield part.name
        if isinstance(part, ast.ClassDef):
            yield from (f"{part.name}.{name}" for name in symbols(part))
        targets = part.targets if isinstance(part, ast.Assign) else []
        targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def is_there(name: str, words: set[str]) -> bool:
    """Return whether a file, a ``file::symbol``, or each word of a piece of code is in the tree."""
    path, mark, symbol = name.partition("::")
    if mark:
        file = ROOT / path
        return file.exists() and symbol in set(symbols(ast.parse(file.read_text())))
    if "<" not in path and ("/" in path or path.endswith((".py", ".md", ".toml"))):
        return (ROOT / path).exists()
    return set(re.findall(r"[A-Za-z_]\w+", name)) <= words


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Return every word of the package's sources and tables, and of the Makefile."""
    files = [ROOT / "Makefile"]
    files += [each for end in ("py", "toml") for each in (ROOT / "vllm_memprof").rglob(f"*.{end}")]
    return set().union(*(re.findall(r"[A-Za-z_]\w+", file.read_text()) for file in files))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_guides_name_what_is_there(page: Path, words: set[str]) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    names = set(re.findall(r"`([^`]+)`", prose))
    assert len(names) > 20
    assert {name for name in names if not is_there(" ".join(name.split()), words)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "vllm_memprof/text.py::no_such_function",
        "vllm_memprof/capture/recorder.py::Recorder.no_such_method",
        "vllm_memprof/no_such_file.py",
        "no_such_figure_bytes",
    ],
)
def test_a_name_that_is_not_there_is_found_out(name: str, words: set[str]) -> None:
    assert not is_there(name, words)


def test_the_records_of_the_guide_are_those_of_the_run() -> None:
    page = (DOCS / "develop/from-byte-to-table.md").read_text()
    shown = json.loads(re.findall(r"```json\n(.*?)```", page, re.S)[0])
    shown["snapshot"].pop("…")
    events = [
        json.loads(line)
        for file in sorted((DATA / "recorded_tiny_tp2" / "events").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert any(
        event["kind"] == "phase"
        and {**event, **shown, "snapshot": event["snapshot"]} == event
        and shown["snapshot"].items() <= (event["snapshot"] or {}).items()
        for event in events
    )
    lines = draw(read_report(str(DATA / "recorded_tiny_tp2")), "table", to_file=True).splitlines()
    for line in re.findall(r"```text\n(.*?)```", page, re.S)[0].splitlines():
        assert line in lines


# --- the glossary ---------------------------------------------------------------------------------

#: Parts of the glossary that hold in every document.
EVERYWHERE = ("In all tables", "Phases", "Owners")
#: Sections whose rows are names of the run's own, e.g. of its arguments or communicators.
OWN_ROWS = (
    *TITLES["file_tables"].values(),
    "Inputs that differ",
    "KV layers by type",
    "Limits of usable tokens",
    "Largest step against",
    "Device memory when an allocation failed",
    "Options that avoid this OOM",
    "Requests: ",
    "Parts of a step",
    "Communicators",
    "Calls of empty_cache",
    "Findings of one run only",
    "Requests",
    "Growth of host memory while serving",
    "Device memory that stayed",
    "Python memory that stayed",
    "Devices",
    "Processes",
)


def glossary() -> dict[str, tuple[list[str], set[str]]]:
    """Return part of the glossary -> its section titles, and its entries."""
    parts = {}
    for part in re.split(r"^## ", (DOCS / "glossary.md").read_text(), flags=re.M)[1:]:
        name, _, body = part.partition("\n")
        entries = {" ".join(entry.split()) for entry in re.findall(r"\*\*(.+?)\*\*", body, re.S)}
        parts[name] = re.findall(r"^### (.*)", body, re.M), entries
    return parts


def checked() -> CheckResult:
    budget = 'min_kv_cache = "1GiB"\nmax_weights = 1\nfail_on = ["negative-kv"]\n'
    run = read_report(str(DATA / "recorded_tiny_tp2"))
    growth = '[regression]\nmax_weights_growth = "1%"\n'
    return check_report(run, parse_budget(f"[budget]\n{budget}{growth}", "budget.toml"), run)


def compared() -> Diff:
    runs = [read_report(str(DATA / name)) for name in ("recorded_013_tp2", "recorded_023_tp2")]
    return diff_reports(runs[0], runs[1])


def is_entry(title: str, entries: set[str]) -> bool:
    """Return whether a title, or the template that it is made of, has an entry."""
    if isinstance(title, Text) and isinstance(inner := title.params.get("title"), str):
        return is_entry(inner, entries)  # "{title} (m)"
    plain = " ".join(re.sub(r"-\n", "", title).split())  # "Reallo-\ncated" in a narrow table
    return plain in entries or any(
        re.fullmatch(template_of(title), entry) is not None for entry in entries
    )


def template_of(title: str) -> str:
    """Return a regular expression for any filling of a title's template."""
    template = title.template if isinstance(title, Text) else title
    pieces = re.split(r"\{[^}]*\}", " ".join(template.split()))
    return ".+".join(re.escape(piece) for piece in pieces)


def lacking(page: Document, part: str) -> Iterator[str]:
    """Yield the titles of a document that the glossary does not have."""
    parts = glossary()
    titles, entries = parts[part]
    entries = entries.union(*(parts[name][1] for name in EVERYWHERE))
    entries |= parts["Report"][1]  # a diff and a check have many rows of a report
    yield from (line.name for line in page.head if not is_entry(line.name, entries))
    for section in page.sections:
        if not any(is_section(section.title, title) for title in titles):
            yield f"section {section.title}"
        yield from (
            f"{section.title}: column {column.title}"
            for column in section.columns
            if column.title and not is_entry(column.title, entries | groups(section))
        )
        if not section.title.startswith(OWN_ROWS):
            yield from (
                f"{section.title}: row {row.cells[0]}"
                for row in section.rows
                if not is_entry(general(row.cells[0]), entries | {key.name for key in KEYS})
            )


def is_section(title: str, heading: str) -> bool:
    """Return whether a heading of the glossary is a title, or one that only adds the ranks."""
    if isinstance(title, Text) and isinstance(inner := title.params.get("title"), str):
        return is_section(inner, heading)  # "{title}, {labels}"
    return bool(re.fullmatch(template_of(title), heading)) or heading.startswith(f"{title}, ")


def groups(section: Section) -> set[str]:
    """Return the communicators that the table of growth has a column for."""
    return {"tp", "dp", "world"} if section.title.startswith("Growth by owner") else set()


def general(cell: str) -> str:
    """Return the first cell of a row without the name of a group or of a finding."""
    if isinstance(cell, Text):
        return cell
    return re.sub(r"^communicator:.+", "communicator:GROUP", cell.partition(" ")[0])


RUNS = sorted(path.parent.name for path in DATA.glob("*/run.json"))
LOGS = sorted(path.name for path in (DATA / "logs").iterdir() if path.suffix in (".log", ".md"))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", RUNS)
def test_every_heading_of_a_report_has_an_entry_in_the_glossary(name: str, width: int) -> None:
    assert list(lacking(document(read_report(str(DATA / name)), width), "Report")) == []


@pytest.mark.parametrize("width", [80, 120])
def test_every_heading_of_requests_has_an_entry_in_the_glossary(width: int) -> None:
    for report in (vision(16384), requests_by_hand(60)):
        found = document(report, width)
        assert any(
            section.title.startswith(("Requests", "Multimodal")) for section in found.sections
        )
        assert list(lacking(found, "Report")) == []


@pytest.mark.parametrize("width", [80, 120])
def test_every_heading_of_growth_has_an_entry_in_the_glossary(width: int) -> None:
    found = document(build_report(traced(leaking())), width)
    titles = [section.title for section in found.sections]
    for start in ("Growth while", "Growth of host", "Device memory that", "Python memory that"):
        assert any(title.startswith(start) for title in titles), start
    assert list(lacking(found, "Report")) == []


@pytest.mark.parametrize("name", LOGS)
def test_every_heading_of_a_log_has_an_entry_in_the_glossary(name: str) -> None:
    for report in read_reports(str(DATA / "logs" / name)):
        assert list(lacking(document(report, 120), "Report")) == []


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "path", sorted((DATA / "memory_files").iterdir()), ids=lambda path: path.name
)
def test_every_heading_of_a_memory_file_has_an_entry_in_the_glossary(
    path: Path, width: int
) -> None:
    for report in read_reports(str(path)):
        assert list(lacking(document(report, width), "Report")) == []


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_heading_of_a_diff_and_a_check_has_an_entry_in_the_glossary(width: int) -> None:
    assert list(lacking(diff_document(compared(), width), "Diff")) == []
    assert list(lacking(check_document(checked(), width), "Check")) == []


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_of_a_budget_file_is_explained(key: LimitKey) -> None:
    assert f"`{key.name}`" in (DOCS / "ci.md").read_text()
