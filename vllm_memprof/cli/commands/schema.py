"""``memprof schema``: the JSON schema of what ``--format json`` prints."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from vllm_memprof.cli.options import command_app
from vllm_memprof.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parents[2] / "report" / "schemas"


def read_schema(name: str) -> str:
    """Return the text of a schema: "report-3", or "report", which is the newest of that name.

    Raises:
        UsageError: there is none.
    """
    known = {path.name.removesuffix(".schema.json"): path for path in FOLDER.glob("*.schema.json")}
    newest = sorted(each for each in known if re.fullmatch(rf"{re.escape(name)}-\d+", each))
    if name not in known and not newest:
        raise UsageError(
            f"there is no schema {name!r}", hint=did_you_mean(name, known, "memprof schema")
        )
    return known[name if name in known else newest[-1]].read_text(encoding="utf-8")


def schema(name: str | None = None) -> None:
    """Print the JSON schema of a command's --format json; without NAME list the schemas.

    The first key of every such document, "schema", names its own: memprof.report/3 is report-3.
    """
    names = sorted(path.name.removesuffix(".schema.json") for path in FOLDER.glob("*.schema.json"))
    typer.echo("\n".join(names) if name is None else read_schema(name), nl=name is None)


app = command_app(schema)
