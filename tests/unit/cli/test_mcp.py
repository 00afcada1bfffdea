"""The MCP server, asked by the SDK's own client over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator

from vllm_memprof.cli.commands import mcp
from vllm_memprof.cli.commands.mcp import TOOLS
from vllm_memprof.errors import RunRecordError

pytest.importorskip("mcp")

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import ListRootsResult, Root

DATA = Path(__file__).parents[2] / "data"
LOG = DATA / "logs/vllm-project__vllm-ascend-1617.log"


def ask(
    folder: Path, question: Callable[[Client], Awaitable[Any]], roots: list[Path] | None = None
) -> Any:
    """Start the server in a folder, and ask it."""

    async def listed(context: Any) -> ListRootsResult:
        return ListRootsResult(roots=[Root(uri=f"file://{root}") for root in roots or []])

    async def main() -> Any:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "vllm_memprof", "mcp"],
            cwd=str(folder),
            env={**os.environ},
        )
        callback = {} if roots is None else {"list_roots_callback": listed}
        async with Client(stdio_client(server), **callback) as client:
            return await question(client)

    return anyio.run(main)


def call(name: str, roots: list[Path] | None = None, folder: Path = DATA, **given: Any) -> Any:
    return calls((name, given), roots=roots, folder=folder)[0]


def calls(
    *asked: tuple[str, dict[str, Any]], roots: list[Path] | None = None, folder: Path = DATA
) -> list[Any]:
    """The answers of one server."""

    async def question(client: Client) -> list[Any]:
        return [await client.call_tool(name, given) for name, given in asked]

    found: list[Any] = ask(folder, question, roots)
    return found


def test_tools_are_listed_with_their_schemas() -> None:
    listed = ask(DATA, lambda client: client.list_tools()).tools
    assert [tool.name for tool in listed] == list(TOOLS)
    for tool in listed:
        Draft202012Validator.check_schema(tool.input_schema)
        Draft202012Validator.check_schema(tool.output_schema or {})
        assert bool(tool.output_schema) == ("schema" in TOOLS[tool.name])


def test_a_log_by_path_and_by_text_is_explained() -> None:
    found, typed = calls(
        ("explain_log", {"log": str(LOG)}), ("explain_log", {"text": LOG.read_text()})
    )
    assert not found.is_error
    report = found.structured_content["result"]
    assert report["schema"].startswith("memprof.report/")
    assert report["failure"]["kind"]
    assert report["failure"]["title"] in found.content[0].text
    assert typed.structured_content["result"]["failure"] == report["failure"]


def test_a_section_and_a_mistaken_one() -> None:
    named, wrong = calls(
        *(
            ("report_section", {"run": str(LOG), "section": each})
            for each in ("failure", "failures")
        )
    )
    assert named.structured_content["result"][0]["kind"]
    assert wrong.is_error
    assert "failure" in wrong.content[0].text


def test_files_outside_of_the_roots_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    inside = tmp_path / "inside/a.log"
    inside.write_text(LOG.read_text())
    link = tmp_path / "inside/link.log"
    link.symlink_to(LOG)

    async def question(client: Client) -> list[Any]:
        outside = (str(LOG), "../inside/../../x.log", "link.log", "*.log", "~/x.log")
        return [
            await client.call_tool("explain_log", {"log": each}) for each in ("a.log", *outside)
        ]

    for roots in ([tmp_path / "inside"], None):
        own, *refused = ask(tmp_path / "inside", question, roots)
        assert not own.is_error
        assert all(each.is_error for each in refused)
        assert {each.content[0].text.partition(":")[0] for each in refused} == {
            "log is outside of the roots that the client gives"
        }
    assert call("explain_log", [], tmp_path, log=str(inside)).is_error


def test_a_plan_that_would_load_code_or_open_a_device_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "npu"}, "simulated device"),
        ({"device": "sim:/etc/passwd"}, "simulated device"),
        ({"arguments": ["--worker-cls", "a.b"]}, "--worker-cls"),
        ({"arguments": ["--trust-remote-code"]}, "--trust-remote-code"),
        ({"arguments": "x"}, "list"),
        ({"model": "--help"}, "model is needed"),
        ({"other": "x"}, "no argument other"),
    ]
    answers = calls(*(("plan", {"model": "Qwen/Qwen3-8B", **given}) for given, _ in refused))
    for found, (_, said) in zip(answers, refused, strict=True):
        assert found.is_error
        assert said in found.content[0].text


def test_models_runs_and_their_reports(tmp_path: Path) -> None:
    models, runs = calls(("list_models", {}), ("list_runs", {}), folder=tmp_path)
    assert "Qwen/Qwen3-8B" in [model["name"] for model in models.structured_content["result"]]
    assert runs.structured_content["result"] == []


def test_a_message_of_an_error_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("nothing\n")
    found = call("explain_log", folder=tmp_path, log="empty.log")
    assert found.is_error
    assert "no line about memory" in found.content[0].text
    assert json.loads(json.dumps(found.model_dump()))


def test_an_answer_that_is_too_large_is_an_error_of_the_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "_MOST_BYTES", 10)
    with pytest.raises(RunRecordError, match="larger than 10 bytes"):
        anyio.run(mcp._run, None, ["sim", "list"])
