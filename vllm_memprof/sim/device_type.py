"""The device type for which vllm-ascend was built, and the one that a device needs.

A build of vllm-ascend is for one type of device, writes it down, and refuses any other. Wheels for
x86-64 are built for A2; on a simulated device of another type the engine is told that type
(``site/memprof_device_type.py``). Standard library alone; runs in the launcher.
"""

from __future__ import annotations

import re
from pathlib import Path

#: Beginning of a SoC's name -> device type. (vllm-ascend 0.23.0, setup.py::gen_build_info: every
#: SoC of a type, by name)
DEVICE_TYPES = {
    "ascend910b": "A2",
    "ascend910_93": "A3",
    "ascend310p": "_310P",
    "ascend950": "A5",
}
BUILD_INFO = "lib/python*/site-packages/vllm_ascend/_build_info.py"
_BUILT_FOR = r"(?m)^__(?:device_type|soc_version)__ = ['\"](\w+)"


def device_type_of(soc_name: str) -> str | None:
    """Return the device type of a SoC; None for one that no release of vllm-ascend names."""
    known = (kind for start, kind in DEVICE_TYPES.items() if soc_name.lower().startswith(start))
    return next(known, None)


def built_for(prefix: Path) -> str | None:
    """Return the device type of the vllm-ascend that is installed in an environment.

    None where there is none, or where its build names neither a type nor, before 0.12, a SoC.
    """
    for path in prefix.glob(BUILD_INFO):
        if found := re.search(_BUILT_FOR, path.read_text("utf-8")):
            return device_type_of(found[1]) or found[1]
    return None
