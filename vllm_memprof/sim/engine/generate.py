"""Run by the engine's interpreter for a self-test: start the engine and make a few tokens.

Arguments: the folder of a model without weights. Prints one line ``MEMPROF {json}`` with how many
tokens came; fails with the engine's own message otherwise.
"""

# ruff: noqa: TID251  (runs in the engine)
import json
import sys

from vllm import LLM, SamplingParams

#: Few positions: the table of the rotary embedding then is within what computes, as the other
#: tensors of a tiny model are.
POSITIONS = 512
#: One token, some, and more than a step takes.
PROMPT_LENGTHS = (1, 4, 300)
NEW_TOKENS = 4


def main() -> None:
    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=POSITIONS,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        hf_overrides={"max_position_embeddings": POSITIONS},
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": [17] * length} for length in PROMPT_LENGTHS]
    outputs = llm.generate(prompts, greedy)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert tokens == NEW_TOKENS * len(PROMPT_LENGTHS), f"{tokens} tokens"
    print("MEMPROF " + json.dumps({"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
