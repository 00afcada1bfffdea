"""Schemas that are written are those of the types, and take what is written and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any, ClassVar

import jsonschema

from scripts.write_schemas import json_schema, schemas
from vllm_memprof.record.codec import computed, one_of, to_json


@dataclass(frozen=True)
class Part:
    """One of the parts."""

    size: int | None
    share: float | int | None = None
    side: Annotated[str, one_of("low", "high")] = "low"


@dataclass(frozen=True)
class Whole:
    """All kinds of fields."""

    name: str  # of the whole
    parts: list[Part]
    high: Part | None = None
    by_number: dict[int, list[str]] = field(default_factory=dict)
    anything: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    other: bool = False
    SCHEMA: ClassVar[str] = "test/1"

    @property
    @computed
    def count(self) -> int | None:
        return len(self.parts) or None


def test_the_files_are_those_of_the_types() -> None:
    folder = files("vllm_memprof.report") / "schemas"
    assert {path.name: path.read_text() for path in folder.iterdir()} == schemas()


def test_the_schema_of_a_type_takes_what_is_written_and_nothing_else() -> None:
    schema = json_schema(Whole)
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    whole = Whole(
        name="whole",
        parts=[Part(5), Part(None, 0.5)],
        high=Part(1),
        by_number={3: ["a"]},
        anything={"deep": [{"x": None}]},
        words=("b", "c"),
        other=True,
    )
    data = to_json(whole)
    assert list(check.iter_errors(data)) == []
    wrong: list[dict[str, Any]] = [
        {"schema": "test/2"},
        {"name": 1},
        {"high": {"size": 1, "share": None, "side": "middle"}},
        {"high": {"share": None, "side": "low"}},
        {"by_number": {"3": [1]}},
        {"words": None},
    ]
    for change in wrong:
        assert len(list(check.iter_errors({**data, **change}))) == 1, change
