"""Device profiles: what the simulated device is and how much memory its runtime takes.

In: ``data/profiles/*.toml``. Out: `DeviceProfile`, and the flat file that the shim reads
(``MEMPROF_SIM_PROFILE``). Runs in the launcher's process.

A file has the tables ``[profile]`` (``name`` and ``aliases``: what ``--device sim:NAME`` accepts;
``title``: one line for people), ``[device]``, ``[memory]``, ``[simulation]`` with every field of
the classes below, and ``[workspace]``: ``"Glob*" = {base = bytes, per_byte = factor, cap = bytes}``
or ``"Glob* Other" = bytes`` by operator name without "aclnn" (of ATB: "Atb" and its parameter,
"AtbSelfAttention"). The first match counts; without one an operator asks for none.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import asdict

from vllm_memprof.errors import SetupError, UsageError, did_you_mean
from vllm_memprof.files import read_table
from vllm_memprof.sim.folders import write_file

PROFILES_DIR = Path(__file__).parent / "data/profiles"
Size = Annotated[int, msgspec.Meta(ge=0)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and its devices."""

    soc_name: str  # answer of aclrtGetSocName; torch_npu and vllm-ascend choose their paths by it
    device_count: Size  # on the machine, before ASCEND_RT_VISIBLE_DEVICES
    total_bytes: Size  # the total of aclrtGetMemInfo: the memory an application may use
    huge_page_bytes: Size  # granularity of large allocations and of physical memory
    normal_page_bytes: Size  # granularity of small allocations
    huge_first_min_bytes: Size  # from this size on a HUGE_FIRST request takes huge pages
    malloc_padding_bytes: Size  # added by aclrtMalloc to a request
    ai_core_count: Size
    vector_core_count: Size
    ai_cpu_count: Size
    l2_cache_bytes: Size
    cann_version: str  # answer to the version query; empty refuses it. torch_npu chooses by it
    driver_version: str  # answer to the query for the driver's version
    #: What all processes may have at a time, captured graphs included; 0: no limit. They hold where
    #: MEMPROF_SIM_LIMITS asks for them. No figure of memory depends on them.
    stream_count: Size = 0
    event_count: Size = 0
    other_chip_total_bytes: Size = 0  # total_bytes of every second device; 0: as of the first


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device memory that the runtime takes beside the application."""

    context_bytes: Size  # by aclrtSetDevice, of the first process on a device
    further_context_bytes: Size  # the same, of each other process on it
    context_runtime_bytes: Size  # of it in the runtime's own counter; the rest lives on the device
    kernels_bytes: Size  # per process and device, by the first operator that has a workspace
    hccl_buffer_mib: Size  # one HCCL buffer, unless HCCL_BUFFSIZE or the communicator says else
    hccl_buffers: Size  # per communicator, at its first collective
    hccl_base_bytes: Size  # per communicator, at its first collective
    atb_pool_bytes: Size  # per process and device, by the first ATB operation
    graph_capture_bytes: Size  # per captured graph, where its capture ends
    graph_argument_bytes: Size  # the same, for each of its tasks
    graph_queue_bytes: Size  # per stream of a graph that runs; doubled until it holds its tasks
    operator_binary_bytes: Size = 0  # per operator that a process launched on a device


class Simulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of what the simulation computes."""

    kept_copy_bytes: Size  # a larger copy to the device drops its bytes
    host_compute_bytes: Size  # operators compute on tensors up to this size


class WorkspaceRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workspace of an operator family: base + per_byte * bytes of the largest tensor, capped."""

    base: Size = 0
    per_byte: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    cap: Size = 0  # 0: none


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated device. Sizes are bytes."""

    name: str
    device: Device
    memory: Memory
    simulation: Simulation
    #: Glob over operator names without "aclnn" -> rule; the first match counts.
    workspace: dict[Annotated[str, msgspec.Meta(pattern=r"^[\w*]+$")], WorkspaceRule] = {}
    aliases: tuple[str, ...] = ()
    title: str = ""


@cache
def list_profiles() -> tuple[DeviceProfile, ...]:
    """Return every profile that is installed, by name."""
    return tuple(_read(path) for path in sorted(PROFILES_DIR.glob("*.toml")))


def _installed() -> dict[str, DeviceProfile]:
    """Return every profile that is installed, by each of its names."""
    return {name: each for each in list_profiles() for name in (each.name, *each.aliases)}


def device_names() -> list[str]:
    """Return what ``--device`` accepts for the profiles that are installed."""
    return [f"sim:{name}" for name in _installed()]


def load_profile(name: str) -> DeviceProfile:
    """Read the profile of that name or alias, or of a TOML file given by its path.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: a profile file that lacks a key or holds a value of the wrong type.
    """
    return _installed().get(name.lower()) or _read(find_profile(name))


def _read(path: Path) -> DeviceProfile:
    try:
        table = read_table(path)
        table["workspace"] = {
            pattern: rule if isinstance(rule, dict) else {"base": rule}
            for patterns, rule in table.get("workspace", {}).items()
            for pattern in patterns.split()
        }
        return msgspec.convert({**table.pop("profile", {}), **table}, DeviceProfile)
    except (AttributeError, TypeError, ValueError) as error:
        raise SetupError(f"the device profile {path} cannot be read: {error}") from error


def find_profile(name: str) -> Path:
    """Return the file of the profile of that name or alias, or the TOML file itself.

    Raises:
        UsageError: no such profile; the message lists those there are.
        SetupError: an installed profile is broken.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    known = _installed()
    if found := known.get(name.lower()):
        return PROFILES_DIR / f"{found.name}.toml"
    raise UsageError(
        f"no device profile named {name!r}",
        did_you_mean(name, known, f"known: {', '.join(known)}; or give the path of a .toml file"),
    )


def write_flat(profile: DeviceProfile, path: Path) -> None:
    """Write the profile for the shim, unless the file says the same already."""
    write_file(path, flat_text(profile))


def flat_text(profile: DeviceProfile) -> str:
    """Return ``key=value`` lines, then ``workspace=<glob> <base> <factor> <cap>``."""
    values = asdict(profile.device) | asdict(profile.memory) | asdict(profile.simulation)
    lines = [f"name={profile.name}", *(f"{key}={value}" for key, value in values.items())]
    lines += [
        f"workspace={pattern} {rule.base} {rule.per_byte} {rule.cap}"
        for pattern, rule in profile.workspace.items()
    ]
    return "\n".join(lines) + "\n"
