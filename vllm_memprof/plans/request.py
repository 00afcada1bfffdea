"""The request for one plan: model, arguments, values of a sweep; and the command that makes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_memprof.engines import engine_row
from vllm_memprof.launch.request import DeviceChoice, parse_device
from vllm_memprof.options import devices_of, with_option
from vllm_memprof.redact import redact_value

#: Options of memprof that a sweep may vary as well.
OWN_OPTIONS = ("device", "stack", "python")
#: Values of memprof's options that are those of no option; of every other one, "auto".
_DEFAULTS = {"engine": "vllm", "until": "kv"}


@dataclass(frozen=True)
class Plan:
    """A plan as requested, before it is made."""

    model: str
    engine_args: list[str]
    #: Option -> value, for the row; secrets redacted.
    values: dict[str, str] = field(default_factory=dict)
    #: Options of memprof: device, stack, ranks...; "" is the value of one that takes none.
    own: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0  # until the engine must be ready
    lengths: tuple[int, ...] = ()  # tokens of requests whose concurrency is wanted

    @classmethod
    def asked(
        cls, model: str, engine_args: Sequence[str], own: Mapping[str, object], timeout_s: float
    ) -> Plan:
        """Return a plan with those options of memprof that were given and say no default."""
        said = {
            name: str(value)
            for name, value in own.items()
            if value is not None and value != _DEFAULTS.get(name, "auto")
        }
        return cls(model, list(engine_args), own=said, timeout_s=timeout_s)

    def vary(self, name: str, value: str) -> Plan:
        """Return the same plan with one option set: the engine's, or memprof's own."""
        values = {**self.values, name: redact_value(name, value)}
        if name in OWN_OPTIONS:
            return replace(self, own={**self.own, name: value}, values=values)
        negatable = engine_row(self.engine).arguments.negatable
        engine_args = with_option(self.engine_args, name, value, negatable)
        return replace(self, engine_args=engine_args, values=values)

    @property
    def devices(self) -> int:
        return devices_of(self.engine_args, engine_row(self.engine).devices)

    @property
    def engine(self) -> str:
        """Return the name of its engine, as ``--engine`` has it."""
        return self.own.get("engine", "vllm")

    @property
    def device(self) -> DeviceChoice:
        """Return its device.

        Raises:
            UsageError: there is no such kind of device.
        """
        return parse_device(self.own.get("device", "auto"))

    @property
    def stack(self) -> str | None:
        """Return its simulated stack; None: the default."""
        return self.own.get("stack") or engine_row(self.engine).stack

    @property
    def shares_nothing(self) -> bool:
        """Return True for simulated devices or none; real devices serve one plan at a time."""
        return self.device.kind in ("sim", "cpu")

    @property
    def title(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or self.model

    def command(self, run_dir: Path) -> list[str]:
        """Return the command of its process: ``memprof plan`` of this installation."""
        own = [f"--{name}={value}" if value else f"--{name}" for name, value in self.own.items()]
        own += [f"--run-dir={run_dir}", "--quiet", f"--startup-timeout={self.timeout_s:g}"]
        memprof = [sys.executable, "-m", "vllm_memprof", "plan"]
        return [*memprof, self.model, *own, "--", *self.engine_args]


@dataclass(frozen=True)
class Task:
    """One plan to make, in a folder of its own."""

    place: int  # among the plans of its question
    plan: Plan
    run_dir: Path
    key: str | None = None  # of its content (`store.key_of`)
    environ: Mapping[str, str] | None = None  # of its process; None: this process's


def folder_name(number: int, plan: Plan, width: int = 2) -> str:
    """Return the name of a plan's folder: its number and its values, in safe characters."""
    values = re.sub(r"[^A-Za-z0-9._=-]+", "-", plan.title).strip("-.")[:100]
    return f"{number:0{width}d}-{values or 'plan'}"
