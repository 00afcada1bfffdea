"""``memprof sim``: simulated devices, and the engine stacks that run on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_memprof.cli.commands.sim_calibrate import write_profile, write_row
from vllm_memprof.cli.help import HelpCommand, HelpGroup
from vllm_memprof.cli.options import Options, with_options
from vllm_memprof.cli.show import printed, progress_bar, say
from vllm_memprof.document import Document, Section
from vllm_memprof.errors import UsageError
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.launch.warm import list_warm, stop_all
from vllm_memprof.report.table import render_table
from vllm_memprof.sim.poison import UNWRITTEN
from vllm_memprof.sim.presets import Preset, list_presets
from vllm_memprof.sim.profiles import list_profiles
from vllm_memprof.sim.runtime import prepare_runtime, stack_state
from vllm_memprof.sim.selftest import run_selftest
from vllm_memprof.sim.setup import SetupProgress, add_extra, download_stack, setup_stack
from vllm_memprof.sim.stacks import Stack, default_prefix, list_stacks, load_extra
from vllm_memprof.tables import Paper, TableFile
from vllm_memprof.units import format_gib

#: Ten megabytes and more: the lines of a log that explain why a step takes its time.
_LARGE_DOWNLOAD = re.compile(r"^Downloading .*\((\d{2,}(\.\d+)? MB|.* GB)\)")

_draw = TableFile(__file__, "sim.toml").draw

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Simulated Ascend devices: engine stacks, device profiles, model presets.",
)


#: Of commands that run a program on a simulated device.
_PROGRAM: Options = {
    "device": (str, "910b"),
    "stack": (str | None, None),
    **dict.fromkeys(("dummy_weights", "share_device"), (bool, False)),
}


def _command(function: Callable[..., None], options: Options | None = None) -> Callable[..., None]:
    """Make a function the command of its name below ``sim``."""
    name = function.__name__.strip("_")
    # what follows the name of a program is the program's
    settings = {"allow_interspersed_args": name != "run"}
    described = with_options(function, f"sim {name}", options)
    return app.command(name, cls=HelpCommand, context_settings=settings)(described)


@_command
def setup(
    stack: str | None = None,
    prefix: Path | None = None,
    force: bool = False,
    extras: list[str] | None = None,
    download: Path | None = None,
    machine: str | None = None,
    offline: Path | None = None,
    quiet: bool = False,
) -> None:
    """Install an engine stack, and build the simulated device.

    Each stack has its own environment. Goes on where an earlier setup stopped. A second run has
    nothing to do.
    """
    for name in extras or []:
        load_extra(name)  # refused before minutes of work

    def interrupt(number: int) -> None:  # as Ctrl-C does: it ends the setup's children too
        raise KeyboardInterrupt

    progress = _SetupProgress(sys.stderr.isatty(), quiet)
    with closing(progress), catch_signals(interrupt):
        if download:
            size = download_stack(stack, download, machine, extras or [], progress)
            typer.echo(f"{download} has {format_gib(size)} GiB: memprof sim setup --offline FOLDER")
            return
        result = setup_stack(stack, prefix, progress, force=force, offline=offline)
        added = {name: add_extra(result, name, progress, offline=offline) for name in extras or []}
    verb = "set up in" if result.changed else "is ready in"
    typer.echo(f"{result.stack.name} {verb} {result.prefix} ({result.seconds:.1f} s)")
    for name, new in added.items():
        typer.echo(f"{name} {'added' if new else 'is there'}")


@_command
def list_() -> None:
    """Show stacks, device profiles and model presets."""

    def state(stack: Stack) -> str:
        found = stack_state(stack, default_prefix(stack.name))
        return {"absent": "not set up"}.get(found, found)

    def size(model: Preset) -> str:
        return f"{model.parameters / 1e9:.1f} B" if model.parameters else ""

    def named(stack: Stack) -> str:
        prefix = default_prefix(stack.name)
        return f"{stack.name}\n{prefix if prefix.exists() else ''}".rstrip()

    _show(
        _draw(Paper(), "stacks", list_stacks(), state=state, named=named),
        _draw(Paper(), "devices", list_profiles(), also=lambda each: ", ".join(each.aliases)),
        _draw(Paper(), "models", list_presets(), size=size),
    )
    if running := list_warm():
        pids = ", ".join(str(process.pid) for process in running)
        typer.echo(f"\nWarm processes for plans: {pids} (`memprof sim stop` ends them)")


@partial(_command, options=_PROGRAM)
def run(ctx: typer.Context, command: list[str], report: bool = False, **options: object) -> None:
    """Run any program on a simulated device: pytest, a server.

    It finds the stack's Python, pytest and vllm first, and presets by their names on a hub.
    """
    from vllm_memprof.cli.run import report_engines
    from vllm_memprof.launch.guest import run_guest

    asked = ctx.params
    runtime = prepare_runtime(asked["device"], asked["stack"])
    for note in runtime.notes:
        say(note)
    ended = partial(report_engines, ctx, runtime) if report else None
    how = asked["dummy_weights"], asked["share_device"], ended
    raise typer.Exit(run_guest(runtime, command, *how))


@partial(_command, options=_PROGRAM)
def shell(ctx: typer.Context, **options: object) -> None:
    """Open a shell whose programs run on a simulated device."""
    run(ctx, [os.environ.get("SHELL", "/bin/sh")])


@_command
def stop() -> None:
    """End the warm processes.

    They have imported the engine, and fork for each plan. Plans under way are not disturbed.
    MEMPROF_NO_WARM=1: plans without.
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

    The profile then is a simulated device: --device sim:FILE. Every value names its source.

    With --row, the run becomes a row of a table of published runs (docs/accuracy.md).
    """
    if not (output or row):
        hint = "-o FILE.toml for a device profile, --row FILE.toml for a row of published runs"
        raise UsageError("nothing to write: neither -o nor --row is given", hint=hint)
    lines = write_profile(run_dir, output, base) if output else []
    lines += write_row(run_dir, row) if row else []
    for line in lines:
        typer.echo(line)


@_command
def selftest(stack: str | None = None, model: str = "memprof/tiny", device: str = "910b") -> None:
    """Run a tiny model, and find what is read but never computed.

    Status 1 if the engine read memory that nobody wrote: it then may size tensors by chance.
    """
    reads = run_selftest(stack, model, device)
    if reads:
        _show(
            _draw(
                Paper(),
                "reads",
                sorted(reads, key=lambda read: (read.kind != UNWRITTEN, read.left_by)),
                {"model": model},
                site=lambda read: read.call_site.replace(" < ", "\n"),
            )
        )
    unwritten = sum(read.kind == UNWRITTEN for read in reads)
    typer.echo(
        f"{unwritten} reads of values that nobody wrote, {len(reads) - unwritten} of values that "
        "are answered without computing; equal ones are counted once"
    )
    raise typer.Exit(1 if unwritten else 0)


def _show(*sections: Section) -> None:
    """Print tables of ``sim.toml``."""
    typer.echo(printed(render_table(lambda _: Document("sim", "", [], [*sections]))))


class _SetupProgress(SetupProgress):
    """A line when a step has ended, and in logs when it begins; on a terminal a spinner with the
    time for the one under way."""

    def __init__(self, live: bool, quiet: bool = False) -> None:
        what = TextColumn("{task.description}", markup=False)
        self._bar = progress_bar(live and not quiet, SpinnerColumn(), what, TimeElapsedColumn())
        self._bar.console.quiet = quiet
        self._task = self._bar.add_task("", total=None)
        self._title = ""

    def step(self, number: int, total: int, title: str) -> None:
        self._title = f"[{number}/{total}] {title}"
        self._bar.reset(self._task, total=None, description=self._title)
        if self._bar.disable:
            self._bar.console.print(self._title)

    def detail(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}  {text[:60]}".strip())
        if self._bar.disable and _LARGE_DOWNLOAD.search(text):
            self._bar.console.print(f"    {text}")

    def done(self, seconds: float) -> None:
        self._bar.console.print(f"{self._title}  {seconds:.1f} s")

    def close(self) -> None:
        self._bar.stop()
