"""A tiny model computes for real: its greedy tokens on the simulated device are those of a CPU.

Both sides run in the engine's environment, from one checkpoint of fixed random weights: vLLM with
vllm-ascend on the simulated device, and the generation of the transformers library on the CPU. vLLM
itself has no kernels for a CPU in this environment.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import run_in_engine

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

#: Over the presets' configurations: few positions and experts, so that the table of the rotary
#: embedding and the weights of all experts of a layer are within the limit of what computes, 1 MiB,
#: as the other tensors are.
SMALLER = {
    "memprof/tiny": {"max_position_embeddings": 512},
    "memprof/tiny-moe": {"max_position_embeddings": 512, "num_experts": 4},
}
NEW_TOKENS = 32
#: Token ids of the prompts: one token, some, more than a block of the KV cache (128), and more than
#: two blocks.
PROMPTS = [
    [17],
    [5, 900, 33, 71],
    [(7 * i + 3) % 998 for i in range(150)],
    [(i * i + 11) % 998 for i in range(300)],
]

#: Writes the checkpoint to argv[1] and prints its greedy tokens, with the least gap between the two
#: largest logits.
ON_CPU = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
job = json.loads(sys.argv[3])
torch.manual_seed(20)
torch.set_num_threads(2)
config = AutoConfig.from_pretrained(folder)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        weight.copy_(1 + 0.2 * torch.randn(weight.shape) if "norm" in name else 0.08 * torch.randn(weight.shape))
model = model.to(dtype)
model.save_pretrained(folder)
tokens, gaps = [], []
with torch.no_grad():
    for prompt in job["prompts"]:
        ids, past, made, least = torch.tensor([prompt]), None, [], float("inf")
        for _ in range(job["new_tokens"]):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            two = logits.topk(2).values
            least = min(least, (two[0] - two[1]).item())
            made.append(int(logits.argmax()))
            ids = torch.tensor([made[-1:]])
        tokens.append(made)
        gaps.append(least)
print("RESULT " + json.dumps({"tokens": tokens, "gaps": gaps}))
"""

#: The same from the engine: every prompt on its own, then all in one batch. At most 256 tokens a
#: step, so that their activations are within the limit too; the longest prompt takes two steps.
ON_DEVICE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    job = json.loads(sys.argv[3])
    llm = LLM(sys.argv[1], dtype=sys.argv[2], enforce_eager=True, max_model_len=512, max_num_batched_tokens=256,
              max_num_seqs=8, gpu_memory_utilization=0.1, enable_prefix_caching=False)
    greedy = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in job["prompts"]]
    def ids(outputs):
        return [list(output.outputs[0].token_ids) for output in outputs]
    alone = [ids(llm.generate([each], greedy))[0] for each in prompts]
    print("RESULT " + json.dumps({"alone": alone, "together": ids(llm.generate(prompts, greedy))}))
"""


def compare(
    sim_stack: str, tmp_path: Path, model: str, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens on the CPU and on the device."""
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime("910b", sim_stack)
    folder = tmp_path / "model"
    shutil.copytree(resolve_model(model, []).path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALLER[model]}))
    job = json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    results = []
    for name, code in (("cpu.py", ON_CPU), ("device.py", ON_DEVICE)):
        (tmp_path / name).write_text(code)
        autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if name == "cpu.py" else {}
        results.append(
            run_in_engine(runtime, tmp_path / name, str(folder), dtype, job, **autoload)[0]
        )
    return results[0], results[1]


@pytest.mark.parametrize(
    "model", ["memprof/tiny", pytest.param("memprof/tiny-moe", marks=pytest.mark.full)]
)
def test_greedy_tokens_are_those_of_the_cpu(sim_stack, tmp_path, model):
    cpu, device = compare(sim_stack, tmp_path, model, "float32")
    assert len({token for made in cpu["tokens"] for token in made}) > 50, (
        "too few different tokens to prove anything"
    )
    assert device["alone"] == cpu["tokens"]
    assert device["together"] == cpu["tokens"]
