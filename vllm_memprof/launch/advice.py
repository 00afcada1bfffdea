"""Advice after a failure: the reason of a failed run enters, a sentence or nothing leaves. Pure."""

from __future__ import annotations

import re

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


def advise(reason: str | None) -> str | None:
    """Return what to try after a failure, where the engine's message is a known one."""
    text = " ".join((reason or "").split())
    return next(
        (f"to try: {advice}" for pattern, advice in ADVICE if re.search(pattern, text)), None
    )
