"""Takes secrets out of what goes into a run record: command lines and environment variables, by
name.

Pure functions, standard library only: open to every layer. ``engine.log`` is not touched: it holds
what the engine itself printed, and is private to its owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

#: A name is secret when it ends with one of these words, whatever joins the words.
_SECRET_ENDINGS = (
    "apikey",
    "apikeys",
    "accesskey",
    "secretkey",
    "privatekey",
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
    "cookie",
)
#: Names that end like a secret and are none.
_HARMLESS = ("eostoken", "bostoken", "padtoken", "perstoken", "pertoken")
_URL_USER = re.compile(r"(://)[^/@\s:]+(:[^/@\s]*)?@")

#: Variables that bear on device memory. A trailing ``_`` makes a prefix. Everything else stays out
#: of the record.
MEMORY_ENV = (
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_NPU_MEMORY_CACHING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "MULTI_STREAM_MEMORY_REUSE",
    "TASK_QUEUE_ENABLE",
    "P2P_HCCL_BUFFSIZE",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "HCCL_",
    "NCCL_",
    "ASCEND_",
    "ACL_",
    "ATB_",
    "VLLM_",
    "MEMPROF_",
)


def is_secret(name: str) -> bool:
    """Return True where an option, variable or JSON key of this name has a secret value.

    Singular ``token`` counts (``--hf-token``), the plural does not (``--max-num-batched-tokens``).
    """
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    return word.endswith(_SECRET_ENDINGS) and not word.endswith(_HARMLESS)


def redact_command(command: list[str]) -> list[str]:
    """Return the command with the values of secret options replaced.

    The forms ``--name value``, ``--name=value`` and JSON are covered.
    A secret option may take several values (vLLM's ``--api-key``): all up to the next option are
    replaced.
    """
    redacted: list[str] = []
    in_secret = False
    for token in command:
        name, equals, value = token.partition("=")
        if token.startswith("-"):
            in_secret = is_secret(name) and not equals
            if equals:
                redacted.append(f"{name}={REDACTED if is_secret(name) else _redact_value(value)}")
            else:
                redacted.append(token)
        else:
            redacted.append(REDACTED if in_secret else _redact_value(token))
    return redacted


def select_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bear on device memory, sorted, secrets replaced."""
    chosen = sorted(filter(_bears_on_memory, env))
    return {name: REDACTED if is_secret(name) else _redact_value(env[name]) for name in chosen}


def memory_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the same variables as they are, for another process; secret ones are left out."""
    return {
        name: value for name, value in env.items() if _bears_on_memory(name) and not is_secret(name)
    }


def _bears_on_memory(name: str) -> bool:
    return any(
        name.startswith(entry) if entry.endswith("_") else name == entry for entry in MEMORY_ENV
    )


def _redact_value(value: str) -> str:
    if value.lstrip().startswith(("{", "[")):
        try:
            data = json.loads(value)
        except (ValueError, RecursionError):
            return _redact_loose(value)
        cleaned = _redact_json(data)
        return value if cleaned == data else json.dumps(cleaned)
    return _URL_USER.sub(rf"\1{REDACTED}@", value)


def _redact_json(data: Any) -> Any:
    if isinstance(data, dict):
        return {
            key: REDACTED if is_secret(str(key)) else _redact_json(value)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [_redact_json(item) for item in data]
    if isinstance(data, str):
        return _URL_USER.sub(rf"\1{REDACTED}@", data)
    return data


def _redact_loose(value: str) -> str:
    """JSON that does not parse: replace what follows a secret-looking key."""

    def replace(match: re.Match[str]) -> str:
        return f"{match.group(1)}{REDACTED}" if is_secret(match.group(2)) else match.group(0)

    loose = re.sub(
        r"""((["']?[\w.-]+["']?)\s*[:=]\s*)("[^"]*"?|'[^']*'?|[^,}\]\s]+)""", replace, value
    )
    return _URL_USER.sub(rf"\1{REDACTED}@", loose)
