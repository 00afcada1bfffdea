"""``memprof sim``: simulated devices, and the engine stacks that run on them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_memprof.cli.commands.sim_calibrate import write_profile, write_row
from vllm_memprof.cli.help import HelpCommand, HelpGroup
from vllm_memprof.cli.options import with_options
from vllm_memprof.errors import UsageError
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.launch.warm import list_warm, stop_all
from vllm_memprof.sim.poison import UNWRITTEN
from vllm_memprof.sim.presets import list_presets
from vllm_memprof.sim.profiles import list_profiles
from vllm_memprof.sim.runtime import stack_state
from vllm_memprof.sim.selftest import run_selftest
from vllm_memprof.sim.setup import add_extra, setup_stack
from vllm_memprof.sim.stacks import default_prefix, list_stacks, load_extra
from vllm_memprof.units import format_gib

#: Ten megabytes and more: the lines of a log that explain why a step takes its time.
_LARGE_DOWNLOAD = re.compile(r"^Downloading .*\((\d{2,}(\.\d+)? MB|.* GB)\)")

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Simulated Ascend devices: engine stacks, device profiles, model presets.",
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function the command of its name below ``sim``."""
    name = function.__name__.strip("_")
    return app.command(name, cls=HelpCommand)(with_options(function, f"sim {name}"))


@_command
def setup(
    stack: str | None = None,
    prefix: Path | None = None,
    force: bool = False,
    extras: list[str] | None = None,
    quiet: bool = False,
) -> None:
    """Install an engine stack into an environment of its own, and build the simulated device.

    Goes on where an earlier setup stopped. A second run has nothing to do.
    """
    for name in extras or []:
        load_extra(name)  # refused before minutes of work

    def interrupt(number: int) -> None:  # as Ctrl-C does: it ends the setup's children too
        raise KeyboardInterrupt

    progress = _SetupProgress(quiet, live=sys.stderr.isatty() and not quiet)
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


@_command
def list_() -> None:
    """Show stacks, device profiles and model presets."""
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


@_command
def stop() -> None:
    """End the warm processes: they have imported the engine, and fork for each plan.

    A plan leaves one behind for the next, which then starts in a third of the time; it ends by
    itself after five minutes without a plan. Plans under way are not disturbed. MEMPROF_NO_WARM=1
    is for plans without.
    """
    asked = stop_all()
    for process in asked:
        typer.echo(f"process {process.pid} ends, once its plans have ended")
    if not asked:
        typer.echo("no warm process is running")


@_command
def calibrate(
    run_dir: Path, output: Path | None = None, row: Path | None = None, base: str | None = None
) -> None:
    """Write a device profile from what a run held outside torch.

    The profile then is a simulated device: --device sim:FILE. Every value names its source: the
    phase and whether it was measured or derived, or the profile it is taken from because the run
    does not tell.

    With --row, the run becomes a row of a table of published runs as well: its command,
    environment and figures, against which plans of the same command are held (docs/accuracy.md).
    """
    if output is None and row is None:
        hint = "-o FILE.toml for a device profile, --row FILE.toml for a row of published runs"
        raise UsageError("nothing to write: neither -o nor --row is given", hint=hint)
    lines = [] if output is None else write_profile(run_dir, output, base)
    lines += [] if row is None else write_row(run_dir, row)
    for line in lines:
        typer.echo(line)


@_command
def selftest(stack: str | None = None, model: str = "memprof/tiny", device: str = "910b") -> None:
    """Run a tiny model, and find what the host reads that the device never computed.

    Status 1 when the engine read memory that nobody wrote: it then may size tensors by chance. What
    is answered without computing, as documented, is listed and is no failure.
    """
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

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right, first = column.startswith(">"), column == columns[0]
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=first
        )
    return table


class _SetupProgress:
    """One line when a step begins, one when it ends; on a terminal a list of finished steps, and a
    spinner with the time for the one under way."""

    def __init__(self, quiet: bool, live: bool) -> None:

        self._plain = not live and not quiet
        self._began = time.monotonic()
        self._title = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False, markup=False),
            transient=True,
            disable=not live,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def step(self, number: int, total: int, title: str) -> None:
        self._title = f"[{number}/{total}] {title}"
        self._bar.reset(self._task, total=None, description=self._title)
        if self._plain:
            print(self._title, flush=True)

    def detail(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}  {text[:60]}".strip())
        if self._plain and _LARGE_DOWNLOAD.search(text):
            print(f"    {text}", flush=True)

    def done(self, seconds: float) -> None:
        if self._plain:
            print(f"    {seconds:.1f} s, {time.monotonic() - self._began:.0f} s in all", flush=True)
        elif not self._bar.disable:
            self._bar.console.print(f"{self._title}  {seconds:.1f} s")

    def close(self) -> None:
        self._bar.stop()
