"""Advice after a failure: the reason of a failed run enters, a sentence or nothing leaves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import did_you_mean
from vllm_memprof.launch.request import LaunchRequest

_UNKNOWN_OPTION = re.compile(r"unrecognized arguments?: (--[\w.-]+)")
_OPTION = re.compile(r"""^    ([a-z]\w+): |["']--([a-z][a-z0-9-]+)["']""", re.MULTILINE)
#: What the engine says -> what to try. The first that matches counts.
ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"Transformers does not recognize this architecture|does not recognize this architecture",
        "the engine's transformers does not know this model_type: correct config.json, run it on "
        "another stack (`memprof sim list`, --stack), or let the folder's own code define it "
        "(--trust-remote-code)",
    ),
    (
        r"Model architectures? .*(?:not supported|failed to be inspected)",
        "this release of vLLM has no such architecture: correct `architectures` in config.json, "
        "or run it on another stack (`memprof sim list`, --stack)",
    ),
    (
        r"preprocessor_config\.json|Can't load (?:image|video)? ?(?:processor|feature extractor)"
        r"|Unrecognized (?:processing class|image processor|feature extractor)",
        "the model takes images, audio or video, and its folder lacks the files of its processor: "
        "copy preprocessor_config.json, and where the model has them processor_config.json and "
        "video_preprocessor_config.json, from its repository",
    ),
    (r"trust.remote.code", "add --trust-remote-code: the model's folder brings code of its own"),
    (
        r"Connection (?:reset|closed) by peer",
        "a rank that this one was connected with has ended: its run, on its host, says why",
    ),
    (
        r"divisible by (?:the )?tensor|must be divisible by tensor|Total number of attention heads",
        "a tensor-parallel size that divides the model's attention heads",
    ),
)


def engine_options(python: str, row: EngineRow) -> list[str]:
    """Return the options that the sources of an installed engine name; none if they are not read.

    A field of a class of options is an option, and so is every text like one.
    """
    ask = "import importlib.util, sys; print(*importlib.util.find_spec(sys.argv[1]).submodule_"
    command = [python, "-c", f"{ask}search_locations)", row.package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        folder = Path(done.stdout.strip())
        files = [file for pattern in row.option_files for file in folder.glob(pattern)]
        texts = [file.read_text() for file in files]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    names = {name for text in texts for pair in _OPTION.findall(text) for name in pair if name}
    return sorted(f"--{name.replace('_', '-')}" for name in names)


def advise(reason: str | None, python: str, row: EngineRow) -> str | None:
    """Return what to try after a failure, where the engine's message is a known one.

    Args:
        reason: of the failure.
        python: the interpreter of the engine, whose sources name its options.
        row: the engine.
    """
    text = " ".join((reason or "").split())
    if found := _UNKNOWN_OPTION.search(text):
        own = [f"--{name.replace('_', '-')}" for name in LaunchRequest.__dataclass_fields__]
        known = [*own, *engine_options(python, row)]
        return f"to try: {did_you_mean(found[1], known, f'leave {found[1]} out')}"
    return next(
        (f"to try: {advice}" for pattern, advice in ADVICE if re.search(pattern, text)), None
    )
