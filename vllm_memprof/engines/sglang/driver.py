"""SGLang without a server; see ``engines.driver``.

The engine's arguments go through SGLang's own parser, so that any of them works and a wrong one
gets SGLang's own message. The schedulers and the detokenizer are processes that SGLang spawns: this
module is imported in each of them and does nothing there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_memprof.engines.driver import Options, run_driver
from vllm_memprof.engines.prompts import Request, load_requests, run_all, tokens_said
from vllm_memprof.record.schema import ENV_STOP_AFTER


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; returns the exit status."""
    return run_driver({"plan": run_plan, "offline": run_offline}, argv)


def run_plan(options: Options, engine_args: list[str]) -> int:
    """Bring all ranks up to their KV cache and stop."""
    os.environ[ENV_STOP_AFTER] = "kv_plan"
    server_args = _server_args(options.model, engine_args)

    from vllm_memprof.engines.sglang import plan_run

    return plan_run.run(server_args, options.devices)


def run_offline(options: Options, engine_args: list[str]) -> int:
    """Serve prompts, one after the other or several at once, and end the engine."""
    requests = load_requests(options)

    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(server_args=_server_args(options.model, engine_args))
    sampling = {"temperature": 0.0, "max_new_tokens": options.max_tokens}

    try:
        run_all(lambda batch: generate(engine, batch, sampling), requests, options)
    finally:
        engine.shutdown()
    return 0


def _server_args(model: str, engine_args: list[str]) -> Any:
    """Return what SGLang's own parser makes of the arguments."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the arguments are made, as SGLang's own server does
    return prepare_server_args(["--model-path", model, *engine_args])


def generate(engine: Any, requests: Sequence[Request], sampling: dict[str, Any]) -> list[str]:
    """Run requests together; returns what is said of each.

    Prompts that are tokens run before those that are text: the engine takes either in one call.
    """
    texts: list[tuple[str, list[str]]] = []
    token_lists: list[list[int]] = []
    for request in requests:
        row = request.row()
        prompt = row.get("prompt")
        if isinstance(prompt, dict):
            token_lists.append(prompt["prompt_token_ids"])
        elif "messages" in row:
            texts.append(_chat(engine, row["messages"]))
        else:
            texts.append((str(prompt), []))
    outputs: list[Any] = []
    if token_lists:
        outputs += engine.generate(input_ids=token_lists, sampling_params=sampling)
    if texts:
        images = [pictures for _, pictures in texts]
        outputs += engine.generate(
            prompt=[text for text, _ in texts],
            sampling_params=sampling,
            image_data=images if any(images) else None,
        )
    told = (output["meta_info"] for output in outputs)
    return [tokens_said(each["prompt_tokens"], each["completion_tokens"]) for each in told]


def _chat(engine: Any, messages: list[Any]) -> tuple[str, list[str]]:
    """Return a chat as the model's template has it, and its images in their order."""
    images: list[str] = []

    def shown(part: Any) -> Any:
        if not isinstance(part, dict) or "image_url" not in part:
            return part
        images.append(part["image_url"]["url"])
        return {"type": "image"}

    chat = [
        {**message, "content": [shown(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    tokenizer = engine.tokenizer_manager.tokenizer
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return str(text), images


if __name__ == "__main__":
    sys.exit(main())
