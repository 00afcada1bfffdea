"""The interpreter and the environment with which an engine runs on a simulated device.

In: a device profile, a stack that is set up. Out: `SimRuntime`. Runs in the launcher's process;
starts nothing.

Layout of a stack's folder (the prefix), which is itself a virtual environment::

    bin/python              the engine's interpreter
    shim/                   the simulated device: one library under the names of CANN's
    left_out/               stand-ins for CUDA libraries that torch links and nothing calls
    stand_ins/              stand-ins for packages that no index has, where a stack names some
    cann/<version>/         what torch_npu looks for in an installed CANN: see `stand_in_cann`
    profiles/<name>-….txt   device profiles as the shim reads them, by their content
    memprof/                memprof itself, for the engine: see `link_package`
    cache/vllm/             compiled graphs; never mixed with those of a real device
    stack.json              written last: what was set up, and from what
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import build, elf, extensions, stand_ins, symbols
from vllm_memprof.sim.device_type import built_for, device_type_of
from vllm_memprof.sim.folders import new_folder, write_file
from vllm_memprof.sim.profiles import DeviceProfile, flat_text, load_profile, write_flat
from vllm_memprof.sim.stacks import Stack, default_prefix, load_stack
from vllm_memprof.version import __version__

PACKAGE_DIR = Path(__file__).resolve().parent.parent
SITE_DIR = PACKAGE_DIR / "sim/site"
STAMP = "stack.json"
#: Names the file in which all processes on a simulated device account for its memory.
ENV_STATE = "MEMPROF_SIM_STATE"
#: Set: weights of one shape are the same numbers; see ``presets``.
ENV_ALIKE = "MEMPROF_SIM_ALIKE"
#: Read by ``site/memprof_device_type.py``.
ENV_DEVICE_TYPE = "MEMPROF_SIM_DEVICE_TYPE"
#: Part of the fingerprint; raise it when setup.py leaves something else behind.
LAYOUT = 1

#: Folders of an installed CANN whose presence torch_npu checks
#: (torch_npu/utils/npu_intercept.py::_cann_package_check).
CANN_FOLDERS = ("opp", "runtime", "compiler")
#: Of one name: ``VLLM_PLUGINS``, an allow-list by name, gets it from the launcher.
ENTRY_POINTS = (
    "[vllm.general_plugins]\nmemprof = vllm_memprof.capture.plugin:register\n"
    "[vllm.platform_plugins]\nmemprof = memprof_device_type:register\n"
    "[sglang.srt.plugins]\nmemprof = vllm_memprof.capture.plugin:register_sglang\n"
    "[sglang.multimodal_gen.plugins]\n"
    "memprof = vllm_memprof.capture.plugin:register_sglang_diffusion\n"
)


@dataclass(frozen=True)
class SimRuntime:
    """The means to start an engine on a simulated device."""

    python: Path  # interpreter of the engine environment
    env: dict[str, str]  # additions to and replacements in os.environ
    profile: DeviceProfile
    stack: Stack
    notes: tuple[str, ...]  # on what differs from an engine on such a device


def prepare_runtime(profile: str, stack: str | None = None) -> SimRuntime:
    """Return the runtime for a profile on a stack.

    Raises:
        UsageError: no such profile or stack.
        SetupError: the stack is not set up, or from other sources; the hint is the command to run.
    """
    device = load_profile(profile)
    chosen = load_stack(stack)
    folder = default_prefix(chosen.name)
    state = stack_state(chosen, folder)
    if state != "ready":
        why = {"absent": "is not set up", "incomplete": "is not completely set up"}
        raise SetupError(
            f"the engine stack {chosen.name} {why.get(state, 'needs an update')} ({folder})",
            setup_command(chosen, folder),
        )
    env = engine_env(device, folder)
    notes: tuple[str, ...] = ()
    if ENV_DEVICE_TYPE in env:
        notes = (
            f"this vllm-ascend was built for {built_for(folder)} devices and is told that it was "
            f"built for {env[ENV_DEVICE_TYPE]}; its compiled operators are those of the build",
        )
    return SimRuntime(folder / "bin/python", env, device, chosen, notes)


def setup_command(stack: Stack, prefix: Path) -> str:
    """Return the command that sets a stack up in that folder."""
    command = f"memprof sim setup --stack {stack.name}"
    return command if prefix == default_prefix(stack.name) else f"{command} --prefix {prefix}"


def stack_state(stack: Stack, prefix: Path) -> str:
    """Return ``ready``, ``outdated`` (set up from other sources), ``incomplete`` or ``absent``."""
    stamp = read_stamp(prefix)
    if not stamp:
        return "incomplete" if (prefix / "pyvenv.cfg").exists() else "absent"
    if not (prefix / "bin/python").exists():
        return "incomplete"
    return "ready" if stamp.fingerprint == fingerprint(stack) else "outdated"


@dataclass(frozen=True)
class Stamp:
    """The record of a complete setup, ``stack.json``."""

    stack: str
    memprof: str  # its version
    fingerprint: str
    finished: str  # ISO 8601, UTC
    seconds: float
    facts: dict[str, object]  # read by the verification


def read_stamp(prefix: Path) -> Stamp | None:
    """Read the stamp of the last complete setup; None where there was none."""
    try:
        return Stamp(**json.loads((prefix / STAMP).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(prefix: Path, stamp: Stamp) -> None:
    """Write the stamp at once or not at all."""
    write_file(prefix / STAMP, json.dumps(asdict(stamp), indent=1) + "\n")


def fingerprint(stack: Stack) -> str:
    """Return a digest of the stack's pins, the sources of the shim and the version of memprof."""
    digest = hashlib.sha256(f"{LAYOUT}\n{__version__}\n".encode())
    modules = [Path(str(module.__file__)) for module in (build, elf, extensions, symbols)]
    written = stand_ins.sources() if stack.stand_ins else []
    for path in [*stack.sources, *modules, *build.native_sources(), *written]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def engine_env(profile: DeviceProfile, prefix: Path) -> dict[str, str]:
    """Return the environment of every engine process; what the user set stays, behind ours."""
    # Two files may hold profiles of one name: a run that is under way keeps reading its own.
    digest = hashlib.sha256(flat_text(profile).encode()).hexdigest()[:12]
    flat = prefix / f"profiles/{profile.name}-{digest}.txt"
    write_flat(profile, flat)
    written = prefix / stand_ins.STAND_INS
    ours = {
        "LD_LIBRARY_PATH": (prefix / "shim", prefix / "left_out"),
        "PYTHONPATH": (SITE_DIR, *[written] * written.is_dir(), link_package(prefix)),
    }
    cann = stand_in_cann(profile, prefix)
    env = {
        name: os.pathsep.join(
            dict.fromkeys([*map(str, paths), *filter(None, os.environ.get(name, "").split(":"))])
        )
        for name, paths in ours.items()
    }
    env |= {
        "MEMPROF_SIM_PROFILE": str(flat),
        # torch_npu checks that these exist, and must not look into a real CANN of this machine.
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
    }
    device_type = device_type_of(profile.device.soc_name)
    if device_type and built_for(prefix) not in (None, device_type):
        env[ENV_DEVICE_TYPE] = device_type
    unless_set = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(prefix / "cache/vllm"),
        # xgrammar's library would compile a conversion of tensors at its first import, for minutes,
        # into the user's home. (apache-tvm-ffi, with a torch before 2.10)
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    }
    return env | {name: value for name, value in unless_set.items() if name not in os.environ}


def stand_in_cann(profile: DeviceProfile, prefix: Path) -> Path:
    """Make the folder of an installed CANN of the profile's version, and return it.

    It holds the empty folders whose presence torch_npu checks, and the file from which torch_npu
    takes ``torch.version.cann`` (``torch_npu/utils/collect_env.py::get_cann_version``, 2.8.0 to
    2.10.0: the last ``=`` of the first line with "version"). The engine compares that version; it
    is the one that the runtime answers. A profile without a version has no such file: unknown.
    """
    version = profile.device.cann_version
    home = prefix / "cann" / (version.replace("/", "_") or "unknown")
    for name in CANN_FOLDERS:
        (home / name).mkdir(parents=True, exist_ok=True)
    if version:
        info = home / f"{platform.machine()}-linux/ascend_toolkit_install.info"
        write_file(info, f"package_name=Ascend-cann-toolkit\nversion={version}\n")
    return home


def own_state_file() -> Path:
    """Return a name for the accounting of devices that nobody else uses; nothing is made."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(shared) / f"memprof-sim-{os.getpid()}-{os.urandom(4).hex()}"


def link_package(prefix: Path) -> Path:
    """Make a folder from which the engine imports this memprof, and nothing else of the launcher's.

    It holds a link to the package and the metadata that registers the plug-in (entry point
    ``vllm.general_plugins``). The launcher's own code runs in the engine, also while it is being
    edited; there is no copy that grows old. Each launcher (path, version) has a folder of its own,
    so that two of them can share a stack.
    """
    key = hashlib.sha256(f"{PACKAGE_DIR}\n{__version__}\n{ENTRY_POINTS}".encode()).hexdigest()[:12]
    target = prefix / "memprof" / key
    if (target / PACKAGE_DIR.name / "__init__.py").exists():
        return target
    with new_folder(target) as folder:
        metadata = folder / f"{PACKAGE_DIR.name}-{__version__}.dist-info"
        metadata.mkdir()
        for name, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm-memprof\nVersion: {__version__}\n",
            "entry_points.txt": ENTRY_POINTS,
            "INSTALLER": "memprof sim setup\n",
        }.items():
            (metadata / name).write_text(text)
        (folder / PACKAGE_DIR.name).symlink_to(PACKAGE_DIR)
    return target
