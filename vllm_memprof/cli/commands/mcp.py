"""``memprof mcp``: an MCP server over stdio. Each of its tools is a row of ``mcp.toml``: a command
of memprof, run in a process of its own, whose JSON is the answer.

A path has to be in one of the folders of ``--root``, else in one of the roots that the client
names, or below the server's folder where it names none. Commands redact secrets themselves. A
device is always a simulated one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from vllm_memprof.cli.commands.schema import read_schema
from vllm_memprof.cli.options import command_app
from vllm_memprof.cli.show import recorded
from vllm_memprof.errors import MemprofError, RunRecordError, UsageError, did_you_mean
from vllm_memprof.files import read_own
from vllm_memprof.record.loader import load_info
from vllm_memprof.sources import numbered
from vllm_memprof.version import __version__, pip_install

_TABLE = read_own(__file__, "mcp.toml")
TOOLS: Mapping[str, Mapping[str, Any]] = _TABLE["tool"]
#: Sections of a report that stand in each of its ranks; the others stand beside them.
_OF_RANKS = ("budget", "kv", "weights", "host_memory", "phases", "empty_cache", "requests", "oom")
#: Characters of an answer's text, and bytes of its data, at most.
_MOST_TEXT, _MOST_BYTES = 65_000, 16 << 20
#: Seconds that a cancelled command has to end its engines.
_GRACE_S = 20


def mcp(roots: list[Path] | None = None) -> None:
    """Answer an MCP client over stdin and stdout: explain logs, plan, fit, compare, list runs.

    A client starts it itself: its configuration names the command `memprof mcp`. It needs the
    extra `mcp`. A device is always simulated, and no option that loads code is taken. Paths are
    limited to --root, else to the roots that the client gives, else to this folder.
    """
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise MemprofError(
            "memprof mcp needs the Python SDK of MCP", pip_install("mcp>=2.3,<3")
        ) from error
    server = make_server(roots)

    async def run() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(run)


def make_server(own_roots: Sequence[Path] | None) -> Any:
    """Return the server of the SDK, with the tools and a resource for each recorded run."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    async def list_tools(ctx: Any, params: Any) -> Any:
        tools = [
            types.Tool(
                name=name,
                description=row["about"],
                input_schema=_input_schema(row),
                output_schema=_output_schema(row),
            )
            for name, row in TOOLS.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(ctx: Any, params: Any) -> Any:
        roots = [root.resolve() for root in own_roots or ()] or await _roots(ctx, params)
        if roots is None:  # asked for in the answer, since 2026-07-28: the client calls again
            return types.InputRequiredResult(input_requests={"roots": types.ListRootsRequest()})
        if roots:
            os.chdir(roots[0])  # where reports/ is; one client has the process for itself
        try:
            result, text = await _answer(ctx, roots, params.name, params.arguments or {})
        except MemprofError as error:
            said = "\n".join(filter(None, [error.message, error.hint and f"try: {error.hint}"]))
            return types.CallToolResult(
                content=[types.TextContent(type="text", text=said)], is_error=True
            )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text[:_MOST_TEXT])],
            structured_content={"result": result},
        )

    async def list_resources(ctx: Any, params: Any) -> Any:
        resources = [
            types.Resource(uri=f"memprof://runs/{run.name}", name=run.name, mime_type=_JSON)
            for run in recorded()
        ]
        return types.ListResourcesResult(resources=resources)

    async def read_resource(ctx: Any, params: Any) -> Any:
        name = str(params.uri).removeprefix("memprof://runs/")
        if name not in [run.name for run in recorded()]:
            raise UsageError(f"there is no run {name}")
        text = (await _run(ctx, ["report", f"reports/{name}", "--format", "json"]))[0]
        content = types.TextResourceContents(uri=params.uri, mime_type=_JSON, text=text)
        return types.ReadResourceResult(contents=[content])

    return Server(
        "memprof",
        version=__version__,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
    )


_JSON = "application/json"


def _input_schema(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = row.get("arguments", {})
    properties = {name: {"type": "string", "description": said} for name, said in texts.items()}
    either = row.get("stdin")  # it or the file: neither alone is required
    needed = [name for name in texts if not either]
    extra = _TABLE["engine_arguments"] if row.get("engine") else {}
    return {"type": "object", "properties": {**properties, **extra}, "required": needed}


def _output_schema(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if "schema" not in row:
        return None
    schema = json.loads(read_schema(row["schema"]))
    shared = {key: schema.pop(key) for key in ("$schema", "$defs") if key in schema}
    several = {"type": "array", "items": schema}  # a log may have several starts
    result = {"anyOf": [schema, several]}
    return {**shared, "type": "object", "properties": {"result": result}, "required": ["result"]}


async def _answer(
    ctx: Any, roots: Sequence[Path], name: str, given: Mapping[str, Any]
) -> tuple[Any, str]:
    """Return the data of a tool's answer, and its text."""
    if name not in TOOLS:
        raise UsageError(f"there is no tool {name!r}", did_you_mean(name, TOOLS, "list the tools"))
    row = TOOLS[name]
    if name == "list_models":
        from vllm_memprof.sim.presets import list_presets

        models = [
            {
                "name": each.name,
                "also": list(each.also),
                "what": each.what,
                "parameters": each.parameters,
            }
            for each in list_presets()
        ]
        return models, json.dumps(models)
    if name == "list_runs":
        runs = []
        for folder in recorded():
            info = load_info(folder)
            runs.append({"name": folder.name, "model": info.model, "started": info.started})
        return runs, json.dumps(runs)
    known = _input_schema(row)["properties"]
    if wrong := sorted(set(given) - set(known)):
        raise UsageError(f"{name} has no argument {', '.join(wrong)}", f"it has {', '.join(known)}")
    typed = given.get(row.get("stdin", ""))
    texts = {key: "-" if typed is not None else given.get(key) for key in row["arguments"]}
    for key in row["reads"]:
        if texts[key] != "-":
            _require_within(roots, key, texts[key])
    words = [_filled(word, texts) for word in row["command"]]
    words += ["--format", "json", *(_engine_words(given) if row.get("engine") else ())]
    out, said = await _run(ctx, words, typed)
    try:
        found = json.loads(out)
    except ValueError:
        raise RunRecordError(said.strip() or f"memprof {words[0]} printed no JSON") from None
    if "section" in given:
        found = _section(found, given["section"])
    if not row.get("markdown"):
        return found, json.dumps(found, ensure_ascii=False)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as kept:
        kept.write(out)
        kept.flush()
        of_first = f"{kept.name}#1" if isinstance(found, list) else kept.name
        words = ["report", of_first, "--format", "markdown"]
        return found, (await _run(ctx, words))[0]


def _filled(word: str, texts: Mapping[str, Any]) -> str:
    name = word.strip("{}")
    if word == name:
        return word
    text = texts.get(name)
    if not isinstance(text, str) or not text or (text.startswith("-") and text != "-"):
        raise UsageError(f"{name} is needed, as a text: {text!r}")
    return text


def _engine_words(given: Mapping[str, Any]) -> list[str]:
    """Return the options of a start: ours, then those of the engine that bear on memory."""
    device, arguments = given.get("device", "sim:910b"), given.get("arguments", [])
    if not isinstance(device, str) or not device.partition(":")[0] == "sim" or "/" in device:
        raise UsageError(f"a tool plans on a simulated device, not on {device!r}", "sim:910b")
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise UsageError("arguments is a list of texts")
    for word in arguments:
        option = word.partition("=")[0]
        if word.startswith("-") and option not in _TABLE["engine_options"]:
            raise UsageError(
                f"{option} is not an option that bears on memory and loads no code",
                did_you_mean(option, _TABLE["engine_options"], "memprof plan in a shell"),
            )
    own = [f"--{key}={given[key]}" for key in ("engine", "stack") if given.get(key)]
    return ["--device", device, "--quiet", *own, "--", *arguments]


def _section(found: Any, name: str) -> Any:
    reports = found if isinstance(found, list) else [found]
    if name in _OF_RANKS:
        return [
            {"rank": rank["rank"], "label": rank["label"], name: rank[name]}
            for report in reports
            for rank in report["ranks"]
        ]
    if name not in reports[0]:
        known = [*_OF_RANKS, *(key for key in reports[0] if key != "ranks")]
        raise UsageError(
            f"a report has no section {name!r}", did_you_mean(name, known, ", ".join(known))
        )
    return [report[name] for report in reports]


async def _roots(ctx: Any, params: Any) -> list[Path] | None:
    """Return the folders that the client lets us read: its roots, else the server's own folder.

    None: the protocol lets us ask for them by an answer alone.
    """
    from mcp.shared.exceptions import NoBackChannelError

    told = ctx.session.client_params
    if told is None or told.capabilities.roots is None:
        return [Path.cwd()]
    given = (params.input_responses or {}).get("roots")
    try:
        listed = given or await ctx.session.list_roots()
    except NoBackChannelError:
        return None
    return [Path(unquote(urlparse(str(root.uri)).path)).resolve() for root in listed.roots]


def _require_within(roots: Sequence[Path], name: str, text: Any) -> None:
    """Refuse a path outside of the roots, through a link too. A name without a slash is no path.

    Raises:
        UsageError: it is outside, or there is no root.
    """
    if not roots:
        raise UsageError("the client gives no root, so no file may be read")
    path, _ = numbered(str(text))
    told = Path(path).expanduser()
    pattern = any(mark in path for mark in "*?[")
    named = told.is_absolute() or told.exists() or ".." in path
    if not named and not pattern:
        return  # the name of a run or of a model
    real = told.resolve()
    if pattern or not any(real.is_relative_to(root) for root in roots):
        raise UsageError(
            f"{name} is outside of the roots that the client gives: {path}",
            f"a path below {', '.join(map(str, roots))}",
        )


async def _run(ctx: Any, words: Sequence[str], typed: str | None = None) -> tuple[str, str]:
    """Run a command of memprof; return its output and its messages, which are progress too.

    Cancelled, it is interrupted as by Ctrl-C, so that its engines end.
    """
    import anyio

    command = [sys.executable, "-m", "vllm_memprof", *words]
    out, said = bytearray(), list[str]()
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    process = await anyio.open_process(command, env=env, start_new_session=True)

    async def told(stream: Any) -> None:
        rest = ""
        async for data in stream:
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in filter(str.strip, lines):
                said.append(line)
                await ctx.session.report_progress(len(said), None, line.strip())
        said.append(rest)

    async def gave(stream: Any) -> None:
        await stream.send((typed or "").encode())
        await stream.aclose()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(told, process.stderr)
            tasks.start_soon(gave, process.stdin)
            answer: Any = process.stdout
            async for data in answer:
                out += data
                if len(out) > _MOST_BYTES:
                    tasks.cancel_scope.cancel()
        if len(out) > _MOST_BYTES:
            raise RunRecordError(f"the answer is larger than {_MOST_BYTES} bytes", "report_section")
        await process.wait()
    finally:
        if process.returncode is None:
            with anyio.CancelScope(shield=True):
                os.killpg(process.pid, signal.SIGINT)
                with anyio.move_on_after(_GRACE_S):
                    await process.wait()
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
    return out.decode(errors="replace"), "\n".join(said)


app = command_app(mcp)
