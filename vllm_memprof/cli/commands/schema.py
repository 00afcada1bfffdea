"""``memprof schema``: the JSON schema of what ``--format json`` prints."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from vllm_memprof.cli.options import command_app
from vllm_memprof.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parents[2] / "report/schemas"
_END = ".schema.json"


def list_schemas() -> list[str]:
    """Return the names of all schemas."""
    return sorted(path.name.removesuffix(_END) for path in FOLDER.glob(f"*{_END}"))


def read_schema(name: str) -> str:
    """Return the text of a schema: "report-3", or "report", which is the newest of that name.

    Raises:
        UsageError: there is none.
    """
    known = list_schemas()
    found = [each for each in known if name in (each, re.sub(r"-\d+$", "", each))]
    if not found:
        raise UsageError(
            f"there is no schema {name!r}", hint=did_you_mean(name, known, "memprof schema")
        )
    return (FOLDER / f"{found[-1]}{_END}").read_text("utf-8")


def schema(name: str | None = None) -> None:
    """Print the JSON schema of a command's --format json; without NAME list the schemas.

    The first key of every such document, "schema", names its own: memprof.report/3 is report-3.
    """
    typer.echo("\n".join(list_schemas()) if name is None else read_schema(name), nl=name is None)


app = command_app(schema)
