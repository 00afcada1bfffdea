"""A request for a run, as plain data. No device is touched here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import UsageError
from vllm_memprof.record.schema import EMPTY_CACHE_AT

DEVICE_KINDS = ("auto", "npu", "cuda", "cpu", "sim")
DEFAULT_PROFILE = "910b"
DEFAULT_STARTUP_TIMEOUT_S = 600.0
#: Which ranks a plan runs; "auto" is all of them where they fit this machine, else one.
RANKS = ("auto", "one", "all", "edges")


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
        known = "auto, npu, cuda, cpu, sim or sim:PROFILE, e.g. sim:910b"
        raise UsageError(f"--device {text!r} is not known", hint=known)
    if kind == "sim":
        return DeviceChoice(kind, profile or DEFAULT_PROFILE)
    return DeviceChoice(kind)


@dataclass(frozen=True)
class LaunchRequest:
    """One run, before anything has been looked up."""

    mode: str  # serve | offline | plan
    model: str
    engine_args: list[str] = field(default_factory=list)
    device: DeviceChoice = field(default_factory=lambda: DeviceChoice("auto"))
    run_dir: Path | None = None
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    python: str | None = None
    stack: str | None = None
    share_device: bool = False  # with all that do so, on a simulated device; else it is alone there
    prompts_file: Path | None = None  # one JSON object per line
    prompts: list[str] = field(default_factory=list)
    images_dir: Path | None = None
    at_once: bool = False  # all prompts in one batch
    max_tokens: int | None = None
    sleep_cycles: int = 0  # sleep and wake-up, each followed by the first prompt again
    empty_cache_at: list[str] = field(default_factory=list)  # phases after which memprof does it
    ranks: str | None = None  # of a plan: one of RANKS
    rank: int | None = None
    quiet: bool = False
    keep_secrets: bool = False  # in engine.log
    typed: list[str] = field(default_factory=list)  # the command as typed, secrets and all

    def __post_init__(self) -> None:
        if self.startup_timeout_s <= 0:
            raise UsageError("--startup-timeout must be above 0 seconds")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError("--max-tokens must be at least 1")
        if self.sleep_cycles < 0:
            raise UsageError("--sleep-cycles must not be negative")
        unknown = [phase for phase in self.empty_cache_at if phase not in EMPTY_CACHE_AT]
        if unknown:
            raise UsageError(
                f"--empty-cache-at: no phase {', '.join(map(repr, unknown))}",
                hint=f"one of {', '.join(EMPTY_CACHE_AT)}",
            )
        if self.ranks is not None and self.ranks not in RANKS:
            raise UsageError(
                f"--ranks {self.ranks!r} is not known", hint=f"one of {', '.join(RANKS)}"
            )
        if self.rank is not None and self.rank < 0:
            raise UsageError("--rank must not be negative")
        if self.rank is not None and self.ranks not in (None, "auto", "one"):
            raise UsageError(f"--rank goes with --ranks one, not with --ranks {self.ranks}")
        if self.share_device and not self.device.simulated:
            raise UsageError(
                "--share-device is for a simulated device: a real one is shared as it is",
                hint="add --device sim:910b, or leave --share-device out",
            )
        if not self.device.simulated and (self.rank is not None or self.ranks in ("one", "edges")):
            auto = self.ranks in (None, "auto")
            what = f"--rank {self.rank}" if auto else f"--ranks {self.ranks}"
            raise UsageError(
                f"{what} needs a simulated device: on hardware a rank waits for all others",
                hint="add --device sim:910b, or use --ranks all",
            )
        for option, path in (("--prompts", self.prompts_file), ("--images", self.images_dir)):
            if path is not None and not path.exists():
                raise UsageError(f"{option} {path} does not exist")
