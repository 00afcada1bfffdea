"""``memprof sim``: simulated devices, and the engine stacks that run on them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.help import HelpCommand, HelpGroup
from vllm_memprof.units import format_gib

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

#: Ten megabytes and more: the lines of a log that explain why a step takes its time.
_LARGE_DOWNLOAD = re.compile(r"^Downloading .*\((\d{2,}(\.\d+)? MB|.* GB)\)")

Stack = Annotated[
    str | None,
    typer.Option(
        "--stack", help="Engine stack; default: the newest.", autocompletion=complete.stacks
    ),
]

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Simulated Ascend devices: engine stacks, device profiles, model presets.",
)


@app.command("setup", cls=HelpCommand)
def setup(
    stack: Stack = None,
    prefix: Annotated[
        Path | None, typer.Option("--prefix", help="Folder of the environment; default: cache.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build and verify also where everything is there.")
    ] = False,
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="NAME", help="Packages that the engine can do without: ray. Repeat."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")] = False,
) -> None:
    """Install an engine stack into an environment of its own, and build the simulated device.

    Goes on where an earlier setup stopped. A second run has nothing to do.
    """
    from vllm_memprof.launch.signals import catch_signals
    from vllm_memprof.sim.setup import add_extra, setup_stack
    from vllm_memprof.sim.stacks import load_extra

    for name in extras or []:
        load_extra(name)  # refused before minutes of work

    def interrupt(number: int) -> None:  # as Ctrl-C does: it ends the setup's children too
        raise KeyboardInterrupt

    plain = quiet or not sys.stderr.isatty()
    progress = _PlainProgress(quiet) if plain else _LiveProgress()
    try:
        with catch_signals(interrupt):
            result = setup_stack(stack, prefix, progress, force=force)
            added = [name for name in extras or [] if add_extra(result, name, progress)]
    finally:
        progress.close()
    verb = "set up in" if result.changed else "is ready in"
    typer.echo(f"{result.stack.name} {verb} {result.prefix} ({result.seconds:.1f} s)")
    for name in extras or []:
        typer.echo(f"{name} {'added' if name in added else 'is there'}")


@app.command("list", cls=HelpCommand)
def list_() -> None:
    """Show stacks, device profiles and model presets."""
    from rich.console import Console

    from vllm_memprof.launch.warm import list_warm
    from vllm_memprof.sim.presets import list_presets
    from vllm_memprof.sim.profiles import list_profiles
    from vllm_memprof.sim.runtime import stack_state
    from vllm_memprof.sim.stacks import default_prefix, list_stacks

    stacks = _table("Engine stacks (--stack)", "name", "state", "folder", "contents")
    words = {"outdated": "set up again", "absent": "not set up"}
    for stack in list_stacks():
        prefix = default_prefix(stack.name)
        state = stack_state(stack, prefix)
        stacks.add_row(stack.name, words.get(state, state), str(prefix), stack.title)
    columns = ("name", "also", ">GiB", ">context GiB", ">devices", "device")
    profiles = _table("Simulated devices (--device sim:NAME)", *columns)
    for profile in list_profiles():
        sizes = format_gib(profile.device.total_bytes), format_gib(profile.memory.context_bytes)
        aliases, count = ", ".join(profile.aliases), str(profile.device.device_count)
        profiles.add_row(profile.name, aliases, *sizes, count, profile.title)
    presets = _table("Model presets (no weights, no hub needed)", "model", ">size", "what")
    for preset in list_presets():
        size = "" if preset.parameters is None else f"{preset.parameters / 1e9:.1f} B"
        presets.add_row(preset.name, size, preset.what)
    console = Console(highlight=False)
    for table in (stacks, profiles, presets):
        console.print(table)
        console.print()
    if running := list_warm():
        pids = ", ".join(str(process.pid) for process in running)
        console.print(f"Warm processes for plans: {pids} (`memprof sim stop` ends them)")


@app.command("stop", cls=HelpCommand)
def stop() -> None:
    """End the warm processes: they have imported the engine, and fork for each plan.

    A plan leaves one behind for the next, which then starts in a third of the time; it ends by
    itself after five minutes without a plan. Plans under way are not disturbed. MEMPROF_NO_WARM=1
    is for plans without.
    """
    from vllm_memprof.launch.warm import stop_all

    asked = stop_all()
    for process in asked:
        typer.echo(f"process {process.pid} ends, once its plans have ended")
    if not asked:
        typer.echo("no warm process is running")


@app.command("calibrate", cls=HelpCommand)
def calibrate(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run on an Ascend or simulated device."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The profile, a .toml file."),
    ] = None,
    row: Annotated[
        Path | None,
        typer.Option(
            "--row",
            metavar="FILE",
            help="Add the run, of an NPU, to the published runs in FILE (.toml).",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PROFILE",
            help="Profile for what the run does not tell; default: the one of its device.",
        ),
    ] = None,
) -> None:
    """Write a device profile from what a run held outside torch.

    The profile then is a simulated device: --device sim:FILE. Every value names its source: the
    phase and whether it was measured or derived, or the profile it is taken from because the run
    does not tell.

    With --row, the run becomes a row of a table of published runs as well: its command,
    environment and figures, against which plans of the same command are held (docs/accuracy.md).
    """
    from vllm_memprof.cli.commands.sim_calibrate import write_profile, write_row
    from vllm_memprof.errors import UsageError

    if output is None and row is None:
        hint = "-o FILE.toml for a device profile, --row FILE.toml for a row of published runs"
        raise UsageError("nothing to write: neither -o nor --row is given", hint=hint)
    lines = [] if output is None else write_profile(run_dir, output, base)
    lines += [] if row is None else write_row(run_dir, row)
    for line in lines:
        typer.echo(line)


@app.command("selftest", cls=HelpCommand)
def selftest(
    stack: Stack = None,
    model: Annotated[
        str, typer.Option("--model", help="A preset of small tensors.")
    ] = "memprof/tiny",
    device: Annotated[
        str, typer.Option("--device", metavar="PROFILE", help="Simulated device.")
    ] = "910b",
) -> None:
    """Run a tiny model, and find what the host reads that the device never computed.

    Status 1 when the engine read memory that nobody wrote: it then may size tensors by chance. What
    is answered without computing, as documented, is listed and is no failure.
    """
    from rich.console import Console

    from vllm_memprof.sim.poison import UNWRITTEN
    from vllm_memprof.sim.selftest import run_selftest

    reads = run_selftest(stack, model, device)
    table = _table(f"{model}: read by the host, not computed", "value", "by", "read", "call site")
    for read in sorted(reads, key=lambda read: (read.kind != UNWRITTEN, read.left_by)):
        where = read.call_site.replace(" < ", "\n")
        table.add_row(read.kind, read.left_by, f"{read.read_by}, {read.bytes} bytes", where)
    if reads:
        Console(highlight=False).print(table)
    unwritten = sum(read.kind == UNWRITTEN for read in reads)
    typer.echo(
        f"{unwritten} reads of values that nobody wrote, {len(reads) - unwritten} of values that "
        "are answered without computing; equal ones are counted once"
    )
    raise typer.Exit(1 if unwritten else 0)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right, first = column.startswith(">"), column == columns[0]
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=first
        )
    return table


class _PlainProgress:
    """One line when a step begins, one when it ends; for logs."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.started = time.monotonic()

    def step(self, number: int, total: int, title: str) -> None:
        self._say(f"[{number}/{total}] {title}")

    def detail(self, text: str) -> None:
        if _LARGE_DOWNLOAD.search(text):
            self._say(f"    {text}")

    def done(self, seconds: float) -> None:
        self._say(f"    {seconds:.1f} s, {time.monotonic() - self.started:.0f} s in all")

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


class _LiveProgress:
    """A list of finished steps, and a spinner with the time for the one under way."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        console = Console(stderr=True, highlight=False, markup=False)
        self.bar = Progress(*columns, console=console, transient=True)
        self.task: TaskID | None = None
        self.title = ""
        self.bar.start()

    def step(self, number: int, total: int, title: str) -> None:
        self.title = f"[{number}/{total}] {title}"
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(self.title, total=None, detail="")

    def detail(self, text: str) -> None:
        if self.task is None:
            self.bar.console.print(text)
        else:
            self.bar.update(self.task, detail=text[:60])

    def done(self, seconds: float) -> None:
        self.bar.console.print(f"{self.title}  {seconds:.1f} s")

    def close(self) -> None:
        self.bar.stop()
