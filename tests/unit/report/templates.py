"""The templates of the package: literals of ``text`` and ``join``, and the words of the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import vllm_memprof
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.accounting.oom.remedies import GIVES, REMEDIES
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.causes.book import read_book
from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.equation import read_equations
from vllm_memprof.files import read_table
from vllm_memprof.plans.model import TABLES
from vllm_memprof.text import Part

PACKAGE = Path(vllm_memprof.__file__).parent
_IN_PAGES = re.compile(r'\bsay\(\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Template:
    where: str  # file:line
    english: str
    names: frozenset[str] | None  # given to it; None: not seen in the source


def parameters(template: str) -> list[str]:
    """Return the parameters of a template with their specs, sorted."""
    return sorted(
        f"{name}:{spec}" for _, name, spec, _ in Formatter().parse(template) if name is not None
    )


def in_source(source: str, where: str) -> Iterator[Template]:
    """Yield the templates of a module; of a table of templates, those that it is made of.

    Raises:
        ValueError: a template is not a literal, so that nobody can look it up.
    """
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("text", "join")
        and node.args
    ]
    for node in ast.walk(ast.parse(source)):  # lists of sentences
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "sentences":
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield Template(f"{where}:{part.lineno}", part.value, None)
    for node in ast.walk(ast.parse(source)):  # titles of columns, declared without a call of text
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Column":
            titles = [*node.args[:1], *(key.value for key in node.keywords if key.arg == "narrow")]
            for title in titles:
                if isinstance(title, ast.Constant) and title.value:
                    yield Template(f"{where}:{node.lineno}", str(title.value), frozenset())
    # ``known`` gives each of the templates in a module that calls it its one parameter.
    tables = "known(" in source or any(isinstance(call.args[0], ast.Subscript) for call in calls)
    for call in calls:
        place, first = f"{where}:{call.lineno}", call.args[0]
        if isinstance(first, ast.Subscript):
            continue
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
            raise ValueError(f"{place}: {ast.unparse(first)} is not a literal")
        names = [keyword.arg for keyword in call.keywords]
        joined = ast.unparse(call.func) == "join"
        unknown = joined or None in names or (tables and not names) or len(call.args) > 1
        yield Template(place, first.value, None if unknown else frozenset(map(str, names)))


def in_table(where: str, parts: Iterable[Part]) -> Iterator[Template]:
    """Yield the sentences of a table, but those that are a figure alone."""
    for part in parts:
        for one in part if isinstance(part, tuple) else (part,):
            said = one if isinstance(one, str) else one["say"]
            if not re.fullmatch(r"\{\w+\}", said):
                yield Template(where, said, None)


def every_template() -> list[Template]:
    """Return the templates of the package and of its pages."""
    found: list[Template] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.name != "text.py" and re.search(r"vllm_memprof\.(text|tables) import", source):
            found += in_source(source, str(path.relative_to(PACKAGE)))
    for rule in FINDINGS.values():
        found += in_table(rule.id, [rule.title, *rule.evidence, *rule.action])
        found += [Template(rule.id, one, None) for one in rule.needs.conditions.values()]
    for name, remedy in REMEDIES.items():
        found += in_table(name, [remedy.argument, *remedy.grounds])
    found += in_table("remedies.toml", [GIVES])
    found += in_table("titles.toml", [title for area in TITLES.values() for title in area.values()])
    for row in (row for rows in read_book().origins.values() for row in rows):
        sentences = [row.title, *(cure.why for cure in row.cures)]
        sentences += [cure.action for cure in row.cures if cure.action is not None]
        found += [Template(f"{row.kind}: {row.title}", words, frozenset()) for words in sentences]
    for row in ENGINES.values():
        said = [row.arguments.share_grounds, row.compared, *(what for *_, what in row.observing)]
        said += [equation.base_title for equation in read_equations(row.folder)]
        found += [Template(f"{row.name}: row.json", each, frozenset()) for each in said if each]
    table = read_table(PACKAGE / "accounting" / "readings" / "quantities.toml")
    table |= read_table(PACKAGE / "accounting" / "readings" / "own.toml")
    words = ("title", "source", "unknown")
    said = [row[key] for row in table.values() for key in words if key in row]
    found += [Template("quantities.toml", each, frozenset()) for each in said]
    usable = read_table(PACKAGE / "accounting" / "budget" / "usable.toml")
    found += in_table("usable.toml", [row["title"] for row in usable["rules"]])
    found += in_table("usable.toml", usable["steps"].values())
    limits = read_table(PACKAGE / "check" / "limits.toml")
    said = [row["title"] for row in limits["figures"].values() if "title" in row]
    said += [row["sense"] for rows in limits["keys"].values() for row in rows.values()]
    found += [Template("limits.toml", each, frozenset()) for each in said]
    said = [row[key] for row in TABLES["owners"].values() for key in row if key != "constants"]
    said += [row["title"] for row in TABLES["curves"].values()]
    said += [*TABLES["owner_changes"].values(), *TABLES["problems"].values()]
    found += [Template("plans: tables.toml", words, None) for words in said]
    for name in ("phases", "report/tables", "compare/tables", "holders/tables", "plans/documents"):
        words = read_table(PACKAGE / f"{name}.toml")
        rows = [
            part
            for row in words["tables"].values()
            for part in (row.get("title", "GiB"), *row.get("notes", ()))
        ]
        rows += [part for row in words.get("sentences", {}).values() for part in row]
        heads = [head for row in words["tables"].values() for head in row.get("columns", ())]
        rows += [title for head in heads for title in (head["title"], head.get("narrow")) if title]
        found += in_table(f"{name}.toml", rows)
    for parts in read_table(PACKAGE / "launch" / "words.toml").values():
        found += in_table("launch: words.toml", parts)
    for path in sorted((PACKAGE / "report" / "templates").iterdir()):
        found += [
            Template(path.name, english, None)
            for english in _IN_PAGES.findall(path.read_text(encoding="utf-8"))
        ]
    return found
