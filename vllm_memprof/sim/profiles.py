"""Device profiles: what the simulated device is and how much memory its runtime takes.

In: ``data/profiles/*.toml``. Out: `DeviceProfile`, and the flat file that the shim reads
(``MEMPROF_SIM_PROFILE``). Runs in the launcher's process.

A file has the tables ``[profile]`` (``name`` and ``aliases``: what ``--device sim:NAME`` accepts;
``title``: one line for people), ``[device]``, ``[memory]``, ``[simulation]`` with every field of
the classes below, and ``[workspace]``: ``"Glob*" = {base = bytes, per_byte = factor, cap = bytes}``
or ``"Glob*" = bytes`` by operator name without "aclnn" (of ATB: "Atb" and its parameter,
"AtbSelfAttention"). The first match counts; operators without one ask for no workspace.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_memprof.errors import SetupError, UsageError, did_you_mean
from vllm_memprof.sim.folders import write_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROFILES_DIR = Path(__file__).parent / "data" / "profiles"


@dataclass(frozen=True)
class Device:
    """The machine and its devices."""

    soc_name: str  # answer of aclrtGetSocName; torch_npu and vllm-ascend choose their paths by it
    device_count: int  # on the machine, before ASCEND_RT_VISIBLE_DEVICES
    total_bytes: int  # the total of aclrtGetMemInfo: the memory an application may use
    huge_page_bytes: int  # granularity of large allocations and of physical memory
    normal_page_bytes: int  # granularity of small allocations
    huge_first_min_bytes: int  # from this size on a HUGE_FIRST request takes huge pages
    malloc_padding_bytes: int  # added by aclrtMalloc to a request
    ai_core_count: int
    vector_core_count: int
    ai_cpu_count: int
    l2_cache_bytes: int
    cann_version: str  # answer to the version query; empty refuses it. torch_npu chooses by it
    driver_version: str  # answer to the query for the driver's version
    #: What all processes may have at a time, captured graphs included; 0: no limit. They hold where
    #: MEMPROF_SIM_LIMITS asks for them. No figure of memory depends on them.
    stream_count: int = field(default=0, repr=False)
    event_count: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Memory:
    """Device memory that the runtime takes beside the application."""

    context_bytes: int  # by aclrtSetDevice, of the first process on a device
    further_context_bytes: int  # the same, of each other process on it
    context_runtime_bytes: int  # of it in the runtime's own counter; the rest lives on the device
    kernels_bytes: int  # per process and device, by the first operator that has a workspace
    hccl_buffer_mib: int  # one HCCL buffer, unless HCCL_BUFFSIZE or the communicator says else
    hccl_buffers: int  # per communicator, at its first collective
    hccl_base_bytes: int  # per communicator, at its first collective
    atb_pool_bytes: int  # per process and device, by the first ATB operation
    graph_capture_bytes: int  # per captured graph, where its capture ends
    graph_argument_bytes: int  # the same, for each of its tasks
    graph_queue_bytes: int  # per stream of a graph that runs; doubled until it holds its tasks


@dataclass(frozen=True)
class Simulation:
    """Limits of what the simulation computes."""

    kept_copy_bytes: int  # a larger copy to the device drops its bytes
    host_compute_bytes: int  # operators compute on tensors up to this size


@dataclass(frozen=True)
class WorkspaceRule:
    """Workspace of an operator family: base + per_byte * bytes of the largest tensor, capped."""

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
    device: Device
    memory: Memory
    simulation: Simulation
    workspace: tuple[WorkspaceRule, ...]  # the first match counts


def list_profiles() -> list[DeviceProfile]:
    """Return every profile that is installed, by name."""
    return [_parse(path) for path in sorted(PROFILES_DIR.glob("*.toml"))]


def device_names() -> list[str]:
    """Return what ``--device`` accepts for the profiles that are installed."""
    return [f"sim:{name}" for each in list_profiles() for name in (each.name, *each.aliases)]


def load_profile(name: str) -> DeviceProfile:
    """Read the profile of that name or alias, or of a TOML file given by its path.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: a profile file that lacks a key or holds a value of the wrong type.
    """
    return _parse(find_profile(name))


def find_profile(name: str) -> Path:
    """Return the file of the profile of that name or alias, or the TOML file itself.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: an installed profile is broken.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    profiles = list_profiles()
    for profile in profiles:
        if name.lower() in (profile.name, *profile.aliases):
            return PROFILES_DIR / f"{profile.name}.toml"
    known = ", ".join(f"{profile.name} ({', '.join(profile.aliases)})" for profile in profiles)
    names = [each for profile in profiles for each in (profile.name, *profile.aliases)]
    hint = f"known: {known}; or give the path of a .toml file"
    raise UsageError(f"no device profile named {name!r}", did_you_mean(name, names, hint))


def write_flat(profile: DeviceProfile, path: Path) -> None:
    """Write the profile for the shim, unless the file says the same already."""
    write_file(path, flat_text(profile))


def flat_text(profile: DeviceProfile) -> str:
    """Return ``key=value`` lines, then ``workspace=<glob> <base> <factor> <cap>``."""
    values = asdict(profile.device) | asdict(profile.memory) | asdict(profile.simulation)
    lines = [f"name={profile.name}", *(f"{key}={value}" for key, value in values.items())]
    lines += [
        f"workspace={rule.pattern} {rule.base_bytes} {rule.per_byte} {rule.cap_bytes}"
        for rule in profile.workspace
    ]
    return "\n".join(lines) + "\n"


def _parse(path: Path) -> DeviceProfile:
    which = f"the device profile {path}"
    try:
        table: dict[str, Any] = {"workspace": {}, **tomllib.loads(path.read_text(encoding="utf-8"))}
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{which} is not TOML: {error}") from error
    for section in ("profile", "device", "memory", "simulation", "workspace"):
        if not isinstance(table.get(section), dict):
            raise SetupError(f"{which} has no [{section}]")
    parts: dict[str, Any] = {}
    for kind in (Device, Memory, Simulation):
        section = kind.__name__.lower()
        rows = table[section]
        types = {each.name: {"int": int, "str": str}[str(each.type)] for each in fields(kind)}
        if unknown := ", ".join(sorted(set(rows) - set(types))):
            raise SetupError(f"{which} has unknown keys in [{section}]: {unknown}")
        for key, type_ in types.items():
            if key not in rows and hasattr(kind, key):
                continue  # it has a default
            value = rows.get(key)
            if type(value) is not type_ or (isinstance(value, int) and value < 0):
                needs = f"{which} needs {key} in [{section}], a {type_.__name__}: {value!r}"
                raise SetupError(needs)
        parts[section] = kind(**rows)
    rules = []
    for pattern, given in table["workspace"].items():
        row = {"per_byte": 0.0, **(given if isinstance(given, dict) else {"base": given})}
        factor = row.pop("per_byte")
        whole = all(type(value) is int and value >= 0 for value in row.values())
        valid = whole and row.keys() <= {"base", "cap"} and re.fullmatch(r"[\w*]+", pattern)
        if not valid or type(factor) not in (int, float) or factor < 0:
            raise SetupError(
                f"{which} has a rule in [workspace] that is none: {pattern!r} = {given!r}",
                "a glob over operator names = bytes, "
                "or {base = bytes, per_byte = factor, cap = bytes}",
            )
        rules.append(WorkspaceRule(pattern, row.get("base", 0), float(factor), row.get("cap", 0)))
    head = table["profile"]
    aliases = head.get("aliases", [])
    return DeviceProfile(
        name=str(head["name"]),
        aliases=tuple(map(str, aliases)) if isinstance(aliases, list) else (),
        title=str(head.get("title", head["name"])),
        workspace=tuple(rules),
        **parts,
    )
