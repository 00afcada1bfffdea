"""The name of this host in records. Standard library only: capture and the launcher use it."""

from __future__ import annotations

import os
import re
import socket

#: Name of this host where the system's is not one: several containers, or hosts that are simulated
#: on one machine.
ENV_HOST = "MEMPROF_HOST"


def host_name() -> str:
    """Return ``MEMPROF_HOST``, else the system's name of this host; fit for the name of a file."""
    return re.sub(r"[^\w.-]", "_", os.environ.get(ENV_HOST, "")) or socket.gethostname()
