"""An agent's questions that need an engine: a plan over MCP, its progress, its run; a cancelled one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


def server(folder: Path) -> Any:
    command = ["-m", "vllm_memprof", "mcp"]
    return stdio_client(
        StdioServerParameters(
            command=sys.executable,
            args=command,
            cwd=str(folder),
            env={**os.environ, "MEMPROF_NO_WARM": "1"},
        )
    )


def test_a_plan_its_progress_and_its_run(sim_stack: str, tmp_path: Path) -> None:
    told: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append(message or "")

    async def main() -> None:
        async with Client(server(tmp_path)) as client:
            given = {
                "model": "memprof/tiny",
                "stack": sim_stack,
                "arguments": ["--max-model-len", "4096", "--enforce-eager"],
            }
            found = await client.call_tool("plan", given, progress_callback=progress)
            assert not found.is_error, found.content
            report = found.structured_content["result"]
            kv_cache = report["ranks"][0]["budget"]["engine_kv_cache_bytes"]
            assert kv_cache
            assert "KV cache" in found.content[0].text
            runs = (await client.call_tool("list_runs", {})).structured_content["result"]
            assert [run["model"] for run in runs] == ["memprof/tiny"]
            section = {"run": runs[0]["name"], "section": "budget"}
            budget = (await client.call_tool("report_section", section)).structured_content
            assert budget["result"][0]["budget"]["engine_kv_cache_bytes"] == kv_cache
            (resource,) = (await client.list_resources()).resources
            (text,) = (await client.read_resource(resource.uri)).contents
            assert str(kv_cache) in text.text

    anyio.run(main)
    assert any("weight_load" in line for line in told), told


@pytest.mark.full
def test_a_cancelled_plan_ends_its_engine(sim_stack: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(server(tmp_path)) as client:
            given = {"model": "Qwen/Qwen3-8B", "stack": sim_stack}
            with anyio.move_on_after(8):
                await client.call_tool("plan", given)
                raise AssertionError("it was not cancelled")
            assert not (await client.call_tool("list_models", {})).is_error
            with anyio.fail_after(40):
                while engines():
                    await anyio.sleep(0.5)

    def engines() -> list[psutil.Process]:
        """Processes that write into this test's run folder."""
        mine = []
        for process in psutil.process_iter(["cmdline"]):
            if str(tmp_path) in " ".join(process.info["cmdline"] or []):
                mine.append(process)
        return mine

    anyio.run(main)
