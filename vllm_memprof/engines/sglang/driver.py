"""SGLang without a server: ``python -m vllm_memprof.engines.sglang.driver {offline|plan} ...``.

Runs under the engine's interpreter. The engine's arguments go through SGLang's own parser, so that
any of them works and a wrong one gets SGLang's own message. The schedulers and the detokenizer are
processes that SGLang spawns: this module is imported in each of them and does nothing there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_memprof.engines.offline import add_arguments, run_all
from vllm_memprof.engines.vllm.prompts import PromptError, Request, load_requests
from vllm_memprof.engines.vllm.rank_choice import RankError
from vllm_memprof.record.schema import ENV_STOP_AFTER


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    own, engine_args = given[:cut], given[cut + 1 :]
    options = _parser().parse_args(own)
    try:
        if options.mode == "plan":
            return run_plan(options, engine_args)
        return run_offline(options, engine_args)
    except (PromptError, RankError) as error:  # a wrong argument of the driver itself
        print(f"memprof {options.mode}: error: {error}", file=sys.stderr)
        return 2


def run_plan(options: argparse.Namespace, engine_args: list[str]) -> int:
    """Bring all ranks up to their KV cache and stop."""
    os.environ[ENV_STOP_AFTER] = "kv_plan"
    server_args = _server_args(options.model, engine_args)

    from vllm_memprof.engines.sglang import plan_run

    return plan_run.run(server_args, options.devices)


def run_offline(options: argparse.Namespace, engine_args: list[str]) -> int:
    """Serve prompts, one after the other or several at once, and end the engine."""
    skip = options.on_error == "skip"
    requests = load_requests(options.prompts, options.prompt, options.images, skip=skip)

    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(server_args=_server_args(options.model, engine_args))
    sampling = {"temperature": 0.0, "max_new_tokens": options.max_tokens}

    def generate(batch: Sequence[Request]) -> list[tuple[int, int]]:
        return [_tokens(output) for output in _generate(engine, batch, sampling)]

    try:
        run_all(generate, requests, options, skip)
    finally:
        engine.shutdown()
    return 0


def _server_args(model: str, engine_args: list[str]) -> Any:
    """Return what SGLang's own parser makes of the arguments."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the arguments are made, as SGLang's own server does
    return prepare_server_args(["--model-path", model, *engine_args])


def _tokens(output: Mapping[str, Any]) -> tuple[int, int]:
    """Return the prompt's and the output's tokens, as the engine counts them."""
    said = output["meta_info"]
    return int(said["prompt_tokens"]), int(said["completion_tokens"])


def _generate(engine: Any, requests: Sequence[Request], sampling: dict[str, Any]) -> list[Any]:
    """Return the outputs of requests that are handed to the engine together, in their order.

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
    return outputs


def _chat(engine: Any, messages: list[Any]) -> tuple[str, list[str]]:
    """Return a chat as the model's template has it, and its images in their order."""
    manager = engine.tokenizer_manager
    images = [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and "image_url" in part
    ]
    shown = [
        {
            **message,
            "content": [
                ({"type": "image"} if isinstance(part, dict) and "image_url" in part else part)
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    text = manager.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    return str(text), images


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_memprof.engines.sglang.driver",
        description="Run the engine without a server. Arguments after -- are SGLang's.",
        allow_abbrev=False,
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    plan = modes.add_parser("plan", help="stop when the KV cache is there", allow_abbrev=False)
    offline = modes.add_parser("offline", help="generate for some prompts", allow_abbrev=False)
    plan.add_argument(
        "--ranks", choices=("auto", "all"), default="all", help="every rank is run: both are one"
    )
    plan.add_argument("--devices", type=int, help="devices of the simulated machine")
    for mode in (plan, offline):
        mode.add_argument("--model", required=True, help="model folder or hub name")
    add_arguments(offline)
    return parser


if __name__ == "__main__":
    sys.exit(main())
