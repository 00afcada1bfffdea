"""Device profiles: what the simulated device is and what its runtime takes.

In: ``profiles/*.toml``. Out: `DeviceProfile`, and the flat file that the shim reads (``MEMPROF_SIM_PROFILE``). Runs in
the launcher's process.

Keys of a profile (every size in bytes):

============================ =======================================================================================
``[profile]``
``name``, ``aliases``        what ``--device sim:NAME`` accepts
``title``                    one line for people
``[device]``
``soc_name``                 what ``aclrtGetSocName`` answers; torch_npu and vllm-ascend choose their paths by it
``device_count``             devices on the machine, before ``ASCEND_RT_VISIBLE_DEVICES``
``total_bytes``              what ``aclrtGetMemInfo`` reports as the total: the memory an application may use
``huge_page_bytes``          granularity of large allocations and of physical memory
``normal_page_bytes``        granularity of small allocations
``huge_first_min_bytes``     from this size on a HUGE_FIRST request takes huge pages
``malloc_padding_bytes``     what ``aclrtMalloc`` adds to a request
``ai_core_count`` ...        core counts and the size of the second-level cache
``cann_version``             answer to the version query; empty refuses it. torch_npu chooses paths by it
``driver_version``           answer to the query for the driver's version
``[memory]``
``context_bytes``            taken per process and device by ``aclrtSetDevice``
``context_runtime_bytes``    the part of it that the runtime's own counter shows; the rest lives on the device
``kernels_bytes``            taken per process and device by the first operator that has a workspace: loaded kernels
``hccl_buffer_mib``          one HCCL buffer in MiB, unless ``HCCL_BUFFSIZE`` or the communicator itself says else
``hccl_buffers``             buffers per communicator, taken at its first collective
``hccl_base_bytes``          taken once per process and device with its first communicator, beside the buffers
``atb_pool_bytes``           taken per process and device by the first ATB operation
``graph_capture_bytes``      per captured graph
``[simulation]``
``kept_copy_bytes``          a larger copy to the device drops its bytes
``host_compute_bytes``       operators that steer the engine compute on tensors up to this size
``[workspace]``
``"Glob*" = {…}``            workspace that an operator asks for, by its name without "aclnn" (of ATB: "Atb" and its
                             parameter, "AtbSelfAttention"); the first match counts, others ask for none. Bytes:
                             ``base + per_byte x bytes of the operator's largest tensor``, at most ``cap`` where
                             that is not 0. Each may be left out; ``"Glob*" = bytes`` is a base alone.
============================ =======================================================================================
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_memprof.errors import SetupError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILES_DIR = Path(__file__).parent / "data" / "profiles"

_SECTIONS: dict[str, dict[str, type]] = {
    "device": {
        "soc_name": str,
        "device_count": int,
        "total_bytes": int,
        "huge_page_bytes": int,
        "normal_page_bytes": int,
        "huge_first_min_bytes": int,
        "malloc_padding_bytes": int,
        "ai_core_count": int,
        "vector_core_count": int,
        "ai_cpu_count": int,
        "l2_cache_bytes": int,
        "cann_version": str,
        "driver_version": str,
    },
    "memory": {
        "context_bytes": int,
        "context_runtime_bytes": int,
        "kernels_bytes": int,
        "hccl_buffer_mib": int,
        "hccl_buffers": int,
        "hccl_base_bytes": int,
        "atb_pool_bytes": int,
        "graph_capture_bytes": int,
    },
    "simulation": {"kept_copy_bytes": int, "host_compute_bytes": int},
}


@dataclass(frozen=True)
class WorkspaceRule:
    """What the operators of one family ask for: ``base_bytes + per_byte * bytes of the largest tensor``, capped."""

    pattern: str  # glob over operator names without "aclnn"
    base_bytes: int
    per_byte: float  # bytes of workspace per byte of the operator's largest tensor
    cap_bytes: int  # 0: none


@dataclass(frozen=True)
class DeviceProfile:
    """A simulated device. Sizes are bytes."""

    name: str
    aliases: tuple[str, ...]
    title: str
    values: dict[str, int | str]  # every key of [device], [memory] and [simulation]
    workspace: tuple[WorkspaceRule, ...]  # the first match counts

    @property
    def soc_name(self) -> str:
        return str(self.values["soc_name"])

    @property
    def device_count(self) -> int:
        return int(self.values["device_count"])

    @property
    def total_bytes(self) -> int:
        return int(self.values["total_bytes"])

    @property
    def context_bytes(self) -> int:
        return int(self.values["context_bytes"])


def list_profiles() -> list[DeviceProfile]:
    """Every profile that is installed, by name."""
    return [_parse(path) for path in sorted(PROFILES_DIR.glob("*.toml"))]


def load_profile(name: str) -> DeviceProfile:
    """The profile of that name or alias, or of a TOML file given by its path.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: a profile file that lacks a key or holds a value of the wrong type.
    """
    return _parse(find_profile(name))


def find_profile(name: str) -> Path:
    """The file of the profile of that name or alias, or the TOML file itself.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: an installed profile is broken.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    profiles = list_profiles()
    wanted = name.lower()
    for profile in profiles:
        if wanted in (profile.name, *profile.aliases):
            return PROFILES_DIR / f"{profile.name}.toml"
    known = ", ".join(f"{profile.name} ({', '.join(profile.aliases)})" for profile in profiles)
    raise UsageError(
        f"no device profile named {name!r}", f"known: {known}; or give the path of a .toml file"
    )


def write_flat(profile: DeviceProfile, path: Path) -> None:
    """Writes the profile as the shim reads it: ``key=value`` lines, then ``workspace=<glob> <base> <factor> <cap>``."""
    text = flat_text(profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def flat_text(profile: DeviceProfile) -> str:
    """The profile in the lines that the shim reads."""
    lines = [f"name={profile.name}", *(f"{key}={value}" for key, value in profile.values.items())]
    lines += [
        f"workspace={rule.pattern} {rule.base_bytes} {rule.per_byte} {rule.cap_bytes}"
        for rule in profile.workspace
    ]
    return "\n".join(lines) + "\n"


def _parse(path: Path) -> DeviceProfile:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"the device profile {path} is not TOML: {error}") from error
    head = _table(table, "profile", path)
    values: dict[str, int | str] = {}
    for section, keys in _SECTIONS.items():
        rows = _table(table, section, path)
        unknown = sorted(set(rows) - set(keys))
        if unknown:
            raise SetupError(
                f"the device profile {path} has unknown keys in [{section}]: {', '.join(unknown)}"
            )
        for key, kind in keys.items():
            value: Any = rows.get(key)
            if (
                not isinstance(value, (int, str))
                or not isinstance(value, kind)
                or isinstance(value, bool)
                or (isinstance(value, int) and value < 0)
            ):
                raise SetupError(
                    f"the device profile {path} needs {key} in [{section}], a {kind.__name__}: {value!r}"
                )
            values[key] = value
    workspace = tuple(
        _workspace_rule(glob, given, path) for glob, given in table.get("workspace", {}).items()
    )
    return DeviceProfile(
        name=str(head["name"]),
        aliases=tuple(str(alias) for alias in head.get("aliases", [])),
        title=str(head.get("title", head["name"])),
        values=values,
        workspace=workspace,
    )


def _workspace_rule(pattern: str, given: Any, path: Path) -> WorkspaceRule:
    fields = {"base": given} if isinstance(given, int) else given
    known = {"base", "per_byte", "cap"}
    if (
        not isinstance(fields, dict)
        or set(fields) - known
        or any(
            isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0
            for value in fields.values()
        )
        or any(isinstance(fields.get(key, 0), float) for key in ("base", "cap"))
        or not re.fullmatch(r"[\w*]+", pattern)
    ):
        raise SetupError(
            f"the device profile {path} has a rule in [workspace] that is none: {pattern!r} = {given!r}",
            "a glob over operator names = bytes, or {base = bytes, per_byte = factor, cap = bytes}",
        )
    return WorkspaceRule(
        pattern, fields.get("base", 0), float(fields.get("per_byte", 0)), fields.get("cap", 0)
    )


def _table(table: dict[str, Any], section: str, path: Path) -> dict[str, Any]:
    rows = table.get(section)
    if not isinstance(rows, dict):
        raise SetupError(f"the device profile {path} has no [{section}]")
    return rows
