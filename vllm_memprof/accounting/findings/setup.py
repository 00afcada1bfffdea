"""Findings about how a run was set up: the allocator's settings, and hooks without figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_memprof.accounting.findings.needs import HOOKS
from vllm_memprof.accounting.findings.registry import ERROR, WARNING, Context, Found, finding_of_run
from vllm_memprof.text import text

#: Settings of the caching allocator that it refuses beside expandable_segments:True.
#: (torch_npu 2.10, NPUAllocatorConfig.cpp::NPUAllocatorConfig::parseArgs)
_NOT_WITH_EXPANDABLE = ("max_split_size_mb", "garbage_collection_threshold")


@finding_of_run(
    "allocator-config-conflict",
    severity=ERROR,
    title=text("A setting of the allocator and expandable_segments:True exclude each other"),
    needs=HOOKS,
)
def allocator_config_conflict(context: Context) -> Iterator[Found]:
    """Find settings that torch_npu refuses beside expandable_segments:True.

    Meaning:
        The allocator ends the process with an error as soon as it reads its variable.

    Computed:
        `PYTORCH_NPU_ALLOC_CONF` holds expandable_segments:True, and max_split_size_mb or
        garbage_collection_threshold (torch_npu 2.10,
        `NPUAllocatorConfig.cpp::NPUAllocatorConfig::parseArgs`).

    To do:
        Keep expandable_segments:True alone.
    """
    for variable, value in sorted(context.run.info.env.items()):
        if not variable.endswith("ALLOC_CONF") or variable == "PYTORCH_CUDA_ALLOC_CONF":
            continue
        settings = dict(entry.strip().partition(":")[::2] for entry in value.split(","))
        both = [name for name in _NOT_WITH_EXPANDABLE if name in settings]
        if settings.get("expandable_segments", "").lower() == "true" and both:
            title = text(
                "{setting} and expandable_segments:True exclude each other", setting=both[0]
            )
            alone = f"{variable}=expandable_segments:True"
            yield Found(f"{variable}={value}", action=alone, title=title)


def _hooks_in(context: Context, titles: Mapping[str, str]) -> Iterator[Found]:
    """Yield required hooks in one of the states, state -> template of the title."""
    for process in context.run.processes:
        for hook in process.hooks.values():
            if hook.need == "required" and hook.state in titles:
                evidence = text(
                    "{target}, {file}, {detail}",
                    target=hook.target or text("no target"),
                    file=process.file,
                    detail=hook.detail or hook.state,
                )
                action = text("memprof doctor shows which hooks bind with the installed versions")
                title = text(titles[hook.state], hook=hook.hook, phase=hook.phase)
                yield Found(evidence, action=action, title=title, about=process.identity)


@finding_of_run(
    "hook-not-bound", severity=WARNING, title=text("A required hook did not bind"), needs=HOOKS
)
def hook_not_bound(context: Context) -> Iterator[Found]:
    """Find required hooks whose target was not there, or that failed.

    Meaning:
        The function that memprof wraps does not exist in the installed engine, or wrapping it
        failed. The phase has no figures.

    Computed:
        The state of the hook when the process ended: missing or error
        (`vllm_memprof/capture/hooks/table.py::HOOKS`).

    To do:
        `memprof doctor` shows which hooks bind with the installed versions.
    """
    titles = {
        "missing": text("Required hook {hook} is missing: {phase} is not measured"),
        "error": text("Required hook {hook} failed to bind: {phase} is not measured"),
    }
    yield from _hooks_in(context, titles)


@finding_of_run(
    "hook-overwritten", severity=WARNING, title=text("A required hook was overwritten"), needs=HOOKS
)
def hook_overwritten(context: Context) -> Iterator[Found]:
    """Find required hooks whose target another package replaced.

    Meaning:
        A plugin put its own function in the place of the wrapped one. memprof binds again; what
        ran before that is not in the figures.

    Computed:
        The state of the hook when the process ended: overwritten. The evidence names the module of
        the replacement.

    To do:
        `memprof doctor` shows which hooks bind with the installed versions.
    """
    title = text("Required hook {hook} is overwritten: {phase} is not measured")
    yield from _hooks_in(context, {"overwritten": title})


@finding_of_run(
    "hook-never-called",
    severity=WARNING,
    title=text("A required hook was never called"),
    needs=HOOKS,
)
def hook_never_called(context: Context) -> Iterator[Found]:
    """Find required hooks that bound and were never called.

    Meaning:
        The engine takes another way than the wrapped function: the phase has no figures although
        it may have happened.

    Computed:
        The state of the hook when the process ended: bound, and no call was counted.

    To do:
        `memprof doctor` shows which hooks bind with the installed versions. A run that ended early
        never gets to some of them.
    """
    title = text("Required hook {hook} is never called: {phase} is not measured")
    yield from _hooks_in(context, {"never_called": title})


@finding_of_run(
    "events-lost", severity=WARNING, title=text("A process could not write its events"), needs=HOOKS
)
def events_lost(context: Context) -> Iterator[Found]:
    """Find times in which a process recorded nothing because its file could not be written.

    Meaning:
        The disk of the run folder was full, or a limit on the size of files was reached. The engine
        went on. What happened in that time is in no figure of the report.

    Computed:
        The first event that could not be written, and the first that could again: both are kept in
        the process's event file (`vllm_memprof/capture/writer.py::EventWriter`).

    To do:
        Free space where the run folder is, or name a folder on another disk with `--run-dir`.
    """
    start = context.run.info.start_t_ns
    for process in context.run.processes:
        for loss in process.losses:
            since, until = (
                text("a moment that is not known")
                if t_ns is None or start is None
                else text("{seconds} s after the launch", seconds=f"{(t_ns - start) / 1e9:.1f}")
                for t_ns in (loss.since_t_ns, loss.until_t_ns)
            )
            if loss.until_t_ns is None:
                evidence = text(
                    "blind from {since} to the end of its record: {reason} ({file})",
                    since=since, reason=loss.reason, file=process.file,
                )  # fmt: skip
            else:
                evidence = text(
                    "blind from {since} to {until}, {count} events not written: {reason} ({file})",
                    since=since, until=until, count=loss.events, reason=loss.reason,
                    file=process.file,
                )  # fmt: skip
            yield Found(
                evidence,
                action=text("free space where the run folder is, or --run-dir on another disk"),
                about=process.identity,
            )
