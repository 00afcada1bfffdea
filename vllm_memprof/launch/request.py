"""A request for a run, as plain data. No device is touched here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.engines import engine_row
from vllm_memprof.engines.base import refuse
from vllm_memprof.errors import UsageError, did_you_mean, require_known
from vllm_memprof.launch.deployment import parse_deployment
from vllm_memprof.record.schema import EMPTY_CACHE_AT

DEVICE_KINDS = ("auto", "npu", "cuda", "cpu", "sim")
DEFAULT_PROFILE = "910b"
DEFAULT_STARTUP_TIMEOUT_S = 600.0
#: Which ranks a plan runs; "auto" is all of them where they fit this machine, else one.
RANKS = ("auto", "one", "all", "edges")
#: Where a plan stops: at the KV plan, or when the largest batches have run.
UNTIL = ("kv", "ready")
#: What an offline run does with a prompt that cannot be read, or that the engine refuses.
ON_ERROR = ("stop", "skip")


@dataclass(frozen=True)
class DeviceChoice:
    """``--device``: a kind, and for ``sim`` the profile."""

    kind: str  # one of DEVICE_KINDS
    profile: str | None = None

    @property
    def simulated(self) -> bool:
        return self.kind == "sim"


def parse_device(text: str) -> DeviceChoice:
    """Parse ``auto``, ``npu``, ``cuda``, ``cpu``, ``sim`` or ``sim:PROFILE``.

    Raises:
        UsageError: anything else.
    """
    kind, colon, profile = text.strip().partition(":")
    kind = kind.lower()
    if kind not in DEVICE_KINDS or (colon and (kind != "sim" or not profile)):
        from vllm_memprof.sim.profiles import device_names

        known = "auto, npu, cuda, cpu, sim or sim:PROFILE, e.g. sim:910b"
        hint = did_you_mean(text, [*DEVICE_KINDS, *device_names()], known)
        raise UsageError(f"--device {text!r} is not known", hint)
    if kind == "sim":
        return DeviceChoice(kind, profile or DEFAULT_PROFILE)
    return DeviceChoice(kind)


def is_rate(text: str) -> bool:
    """Return True for ``16`` (steps) and ``5s`` or ``0.5s`` (seconds), above 0."""
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)s", text)
    return found is not None and float(found[1] or found[2]) > 0


@dataclass(frozen=True)
class LaunchRequest:
    """One run, before anything has been looked up."""

    mode: str  # serve | offline | plan
    model: str
    engine_args: list[str] = field(default_factory=list)
    device: DeviceChoice = field(default_factory=lambda: DeviceChoice("auto"))
    run_dir: Path | None = None
    startup_timeout: float = DEFAULT_STARTUP_TIMEOUT_S
    python: str | None = None
    stack: str | None = None
    share_device: bool = False  # with all that do so, on a simulated device; else it is alone there
    prompts_file: Path | None = None  # one JSON object per line
    prompts: list[str] = field(default_factory=list)
    images_dir: Path | None = None
    at_once: bool = False  # all prompts in one batch
    max_tokens: int | None = None
    repeat: int = 1  # how often all prompts are run
    concurrency: int | None = None  # prompts that are handed to the engine together
    on_error: str = "stop"  # of ON_ERROR
    sample: str | None = None  # every so many steps, "16", or seconds, "5s"; None: not sampled
    trace_allocations: int | None = None  # requests over which allocations that stay are traced
    sleep_cycles: int = 0  # sleep and wake-up, each followed by the first prompt again
    empty_cache_at: list[str] = field(default_factory=list)  # phases after which memprof does it
    ranks: str | None = None  # of a plan: one of RANKS
    rank: int | None = None
    until: str = "kv"  # of a plan: one of UNTIL
    deployment: str | None = None  # NAME or NAME/GROUP of --deployment
    quiet: bool = False
    keep_secrets: bool = False  # in engine.log
    typed: list[str] = field(default_factory=list)  # the command as typed, secrets and all
    engine: str = "vllm"  # of engines.ENGINES

    def __post_init__(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: with what to do instead.
        """
        row = engine_row(self.engine)
        if self.mode not in row.modes:
            raise UsageError(
                f"memprof {self.mode} does not run {row.title} yet",
                f"with --engine {row.name}: memprof {', memprof '.join(row.modes)}",
            )
        named = {"--on-error": (self.on_error, ON_ERROR), "--until": (self.until, UNTIL),
                 "--ranks": (self.ranks or RANKS[0], RANKS)}  # fmt: skip
        for option, (name, names) in named.items():
            require_known(option, name, names)
        given = {
            "--sleep-cycles": self.sleep_cycles,
            "--prompts": self.prompts_file,
            "--images": self.images_dir,
            "--at-once": self.at_once,
            "--concurrency": self.concurrency,
            "--max-tokens": self.max_tokens,
            "--trace-allocations": self.trace_allocations,
            f"--ranks {self.ranks}": self.ranks,
            "--rank": self.rank is not None,
            f"--until {self.until}": self.until != "kv",
        }
        for option, value in given.items():
            if value:
                refuse(row, option)
            if isinstance(value, Path) and not value.exists():
                raise UsageError(f"{option} {value} does not exist")
        if self.deployment is not None:
            parse_deployment(self.deployment)
        alone = self.rank is not None or self.ranks in ("one", "edges")
        what = f"--ranks {self.ranks}" if self.rank is None else f"--rank {self.rank}"
        unknown = ", ".join(
            repr(each) for each in self.empty_cache_at if each not in EMPTY_CACHE_AT
        )
        for wrong, message, hint in (
            (
                self.concurrency is not None and self.at_once,
                "--concurrency and --at-once exclude each other",
                "leave one of them out",
            ),
            (
                self.sample is not None and not is_rate(self.sample),
                f"--sample {self.sample!r} is neither a number of steps nor of seconds",
                "--sample 16 (every 16th step), --sample 5s (every 5 seconds), --sample off",
            ),
            (
                self.trace_allocations is not None and self.sample is None,
                "--trace-allocations counts requests, which --sample off leaves out",
                "leave --sample off out",
            ),
            (
                bool(unknown),
                f"--empty-cache-at: no phase {unknown}",
                f"one of {', '.join(EMPTY_CACHE_AT)}",
            ),
            (
                self.until == "ready" and self.ranks == "edges",
                "--until ready runs batches, for which --ranks edges has no workers",
                "--ranks all or --ranks one",
            ),
            (
                self.rank is not None and self.ranks not in (None, "auto", "one"),
                f"--rank goes with --ranks one, not with --ranks {self.ranks}",
                "--ranks one",
            ),
            (
                self.share_device and not self.device.simulated,
                "--share-device is for a simulated device: a real one is shared as it is",
                "add --device sim:910b, or leave --share-device out",
            ),
            (
                alone and not self.device.simulated,
                f"{what} needs a simulated device: on hardware a rank waits for all others",
                "add --device sim:910b, or use --ranks all",
            ),
        ):
            if wrong:
                raise UsageError(message, hint)
