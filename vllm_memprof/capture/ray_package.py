"""The part of this package that a worker on another node needs, as folders that Ray sends there.

In: the package's own files. Out: a temporary folder with two, the modules and the metadata by which
vLLM finds the plug-in. Runs in the engine core's process.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from vllm_memprof.engines import ENGINES
from vllm_memprof.version import __version__

PACKAGE = Path(__file__).resolve().parent.parent
#: What capture imports: modules, and packages of modules. All of it needs the standard library
#: alone.
PARTS = (
    *("__init__.py", "errors.py", "files.py", "options.py", "redact.py"),
    *("units.py", "version.py"),
    *("capture", "capture/hooks", "record"),
    *("engines", *(f"engines/{name.replace('-', '_')}" for name in ENGINES)),
)
_MARK = "memprof-ray-"
_METADATA = f"{PACKAGE.name}-{__version__}.dist-info"
_ENTRY_POINT = "[vllm.general_plugins]\nmemprof = vllm_memprof.capture.plugin:register\n"


def stage() -> Path:
    """Write the folders into a new temporary one, and return that."""
    staged = Path(tempfile.mkdtemp(prefix=_MARK))
    for part in PARTS:
        source, target = PACKAGE / part, staged / PACKAGE.name / part
        modules = [*source.glob("*.py"), *source.glob("*.json")] if source.is_dir() else [source]
        (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
        for module in modules:
            shutil.copy(module, staged / PACKAGE.name / module.relative_to(PACKAGE))
    metadata = staged / _METADATA
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm-memprof\nVersion: {__version__}\n"
    )
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
    return staged


def modules_of(staged: Path) -> list[str]:
    """Return the folders as Ray's ``py_modules`` takes them."""
    return [str(staged / PACKAGE.name), str(staged / _METADATA)]


def is_staged(module: object) -> bool:
    """Return whether an entry of ``py_modules`` is one of these folders."""
    return isinstance(module, str) and Path(module).parent.name.startswith(_MARK)
