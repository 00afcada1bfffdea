"""Print the size of the package and the habits that make it grow: ``python scripts/size.py``.

Tokens are names, operators, numbers and strings of ``tokenize``; comments, docstrings and
``sim/site`` (which replaces modules of the engines' own environment) do not count. With
``--check``, exit status 1 if a figure is above its limit. ``--by FOLDER`` lists one folder's files.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_memprof"
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
#: What is counted -> the most that is allowed. 303,000 tokens were for what the package did before
#: the ledgers of weights, host memory and usable KV cache, the connectors and what makes strangers'
#: files safe: 3,600 for each of the five; 2,800 are the MCP server, 400 a model's own classes,
#: 4,100 the copies of layers and pieces that are alike: ten to thirty seconds of a large plan.
LIMITS = {
    "tokens of the package": 340_200,
    "private helpers used once, % of functions": 12.0,
    "top-level class names that stand twice": 5,
    "modules outside engines/ and sim/ that name SGLang": 6,
    'branches on source == "log" outside logs/': 5,
    "scripts that import tests, tests that import scripts": 0,
    "words of docs/": 29_240,
    "words of README.md": 1_000,
}
#: Pages with rows of data -> how a line of their rows begins.
LISTS = {"models": r"\|", "accuracy": r"\|", "causes": r"- |  |\d+\. "}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> Iterator[tuple[Path, str]]:
    """Return every module of the package with its text, without ``sim/site``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[:2] != ("sim", "site"):
            yield path, path.read_text()


def tokens_of(text: str, tree: ast.Module) -> list[tokenize.TokenInfo]:
    """Return the tokens that count of one module."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
        and ast.get_docstring(node, clean=False) is not None
    }
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in COUNTED
        and not (token.type == tokenize.STRING and token.start in docstrings)
    ]


def used_once(trees: dict[Path, ast.Module]) -> tuple[list[str], int]:
    """Return the functions that are private and named once, and how many there are of all kinds."""
    private: list[str] = []
    every = 0
    for path, tree in trees.items():
        named: Counter[str] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                every += 1
                own = node.name.startswith("_") and not node.name.startswith("__")
                if own and named[node.name] == 1:
                    private.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    return private, every


def twice(trees: dict[Path, ast.Module]) -> list[str]:
    """Return the names of top-level classes that two or more modules define."""
    where: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    return [f"{name}: {', '.join(each)}" for name, each in sorted(where.items()) if len(each) > 1]


def imports_between(folder: str, other: str) -> list[str]:
    """Return the files of a folder that import a module of another."""
    pattern = re.compile(rf"^\s*(?:from|import) {other}\b", re.MULTILINE)
    files = sorted((ROOT / folder).rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text())]


def words_of(*pages: Path) -> int:
    """Return the words of pages: what has a letter or a digit, no bars and dashes of tables.

    Rows of the lists of models, of runs and of causes are data, of which there can be any number.
    """
    words = 0
    for page in pages:
        text = page.read_text()
        if page.stem in LISTS:
            text = re.sub(rf"(?m)^(?:{LISTS[page.stem]}).*", "", text)
        words += len(re.findall(r"\S*\w\S*", text))
    return words


def main() -> int:
    """Print the table; return 1 with ``--check`` if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail above a limit")
    parser.add_argument("--by", metavar="FOLDER", help="tokens of its files ('.': all)")
    parser.add_argument("--names", action="store_true", help="name what was counted")
    options = parser.parse_args()
    sources = dict(modules())
    trees = {path: ast.parse(text) for path, text in sources.items()}
    sizes = {path: len(tokens_of(text, trees[path])) for path, text in sources.items()}
    folders: Counter[str] = Counter()
    for path, size in sizes.items():
        folders[path.relative_to(PACKAGE).parts[0]] += size
    if options.by:
        below = PACKAGE / options.by
        for path in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if path.is_relative_to(below):
                print(f"{sizes[path]:>8,}  {path.relative_to(PACKAGE)}")
        return 0
    private, every = used_once(trees)
    classes = twice(trees)
    named = [
        str(path.relative_to(PACKAGE))
        for path, text in sources.items()
        if "sglang" in text.lower() and path.relative_to(PACKAGE).parts[0] not in {"engines", "sim"}
    ]
    branches = [
        f"{path.relative_to(PACKAGE)}:{text[: match.start()].count(chr(10)) + 1}"
        for path, text in sources.items()
        if path.relative_to(PACKAGE).parts[0] != "logs"
        for match in re.finditer(r"""source\s*[!=]=\s*["']log["']""", text)
    ]
    crossed = imports_between("scripts", "tests") + imports_between("tests", "scripts")
    counted: dict[str, tuple[float, list[str]]] = {
        "tokens of the package": (sum(sizes.values()), []),
        "private helpers used once, % of functions": (100 * len(private) / every, private),
        "top-level class names that stand twice": (len(classes), classes),
        "modules outside engines/ and sim/ that name SGLang": (len(named), named),
        'branches on source == "log" outside logs/': (len(branches), branches),
        "scripts that import tests, tests that import scripts": (len(crossed), crossed),
        "words of docs/": (words_of(*(ROOT / "docs").rglob("*.md")), []),
        "words of README.md": (words_of(ROOT / "README.md"), []),
    }
    assert counted.keys() == LIMITS.keys()
    over = []
    for title, (value, names) in counted.items():
        limit = LIMITS[title]
        print(f"{value:>10,.6g}  {title} (at most {limit:,})")
        over += [title] if value > limit else []
        if options.names:
            print("".join(f"{'':>12}{name}\n" for name in names), end="")
    lines = sum(text.count("\n") for text in sources.values())
    print(
        f"{len(private)} of {every} functions; {lines:,} lines in {len(sources)} modules;", end=" "
    )
    print(", ".join(f"{name} {size:,}" for name, size in folders.most_common() if size > 5000))
    if options.check and over:
        print("above the limit: " + "; ".join(over), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
