"""The models of docs/models.md: on how many devices each is planned, and who recommends that.

Data only. A model is there as the page recommends it, in W8A8 where it names such a checkpoint for
these devices. ``page`` is a page of vllm-ascend's tutorials
(docs/source/tutorials/models), or of their tests; "" where none names the model: then it is the
least number of devices that people use.
"""

from __future__ import annotations

from dataclasses import dataclass

STACKS = ("vllm-ascend-0.23.0", "vllm-ascend-0.30.0rc2")
#: Device profiles, and their names in the page.
DEVICES = {"910b": "910B", "a3": "A3"}
#: Context of the models that do not have 32,768 tokens.
LENGTH = 32768
SHORTER = {
    "Qwen/Qwen1.5-MoE-A2.7B": 8192,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8192,
    "meta-llama/Meta-Llama-3-70B-Instruct": 8192,
}


@dataclass(frozen=True)
class Case:
    """One model on the devices of one kind: TP, and DP where it is not 1, and EP."""

    model: str
    parallel: dict[str, str]  # profile -> "DP4 TP4 EP"
    page: str = ""
    quantized: bool = False  # W8A8
    also: tuple[str, ...] = ()  # other presets with the same configuration

    def arguments(self, device: str) -> str:
        """Return the engine arguments of a plan on that device."""
        words = []
        for part in self.parallel[device].split():
            if part == "EP":
                words.append("--enable-expert-parallel")
            else:
                option = {"TP": "tensor", "DP": "data", "PP": "pipeline"}[part[:2]]
                words.append(f"--{option}-parallel-size {int(part[2:])}")
        words.append(f"--max-model-len {SHORTER.get(self.model, LENGTH)} --enforce-eager")
        if self.quantized:
            words.append("--quantization ascend")
        return " ".join(words)

    @property
    def name(self) -> str:
        """Name in the page."""
        return ", ".join([self.model, *self.also, *(["W8A8"] if self.quantized else [])])


def _both(
    model: str,
    parallel: str,
    page: str = "",
    quantized: bool = False,
    also: tuple[str, ...] = (),
) -> Case:
    return Case(model, dict.fromkeys(DEVICES, parallel), page, quantized, also)


def _each(
    model: str,
    a2: str,
    a3: str,
    page: str,
    quantized: bool = False,
    also: tuple[str, ...] = (),
) -> Case:
    return Case(model, {"910b": a2, "a3": a3}, page, quantized, also)


_DEEPSEEK_R1 = ("deepseek-ai/DeepSeek-R1",)


CASES = (
    _both("Qwen/Qwen2.5-Omni-7B", "TP1"),
    _both("Qwen/Qwen3.5-27B", "TP2", "Qwen3.5-27B-Qwen3.6-27B", quantized=True),
    _both("Qwen/Qwen3.5-35B-A3B", "TP2 EP", "Qwen3.6-35B-A3B", quantized=True),
    _each("zai-org/GLM-4.5-Air", "TP8 EP", "DP2 TP8 EP", "GLM4.x", quantized=True),
    _each("MiniMaxAI/MiniMax-M2", "TP8 EP", "DP4 TP4 EP", "MiniMax-M2", quantized=True),
    _both("moonshotai/Kimi-K2-Instruct", "DP4 TP8 EP", "multi_node_kimi (0.11)", quantized=True),
    _both("openbmb/MiniCPM3-4B", "TP1"),
    _both("deepseek-ai/DeepSeek-V3", "DP4 TP4 EP", "DeepSeek-V3.1", True, _DEEPSEEK_R1),
    _each("deepseek-ai/DeepSeek-V4-Flash", "TP8 EP", "DP4 TP4 EP", "DeepSeek-V4-Flash", True),
    _each("zai-org/GLM-5", "DP2 TP8 EP", "TP16 EP", "GLM5", True, ("zai-org/GLM-5.1",)),
    _both("Qwen/Qwen3-Next-80B-A3B-Instruct", "TP4", "Qwen3-Next"),
    _each("Qwen/Qwen3-235B-A22B", "TP8 EP", "DP4 TP4 EP", "Qwen3-235B-A22B", quantized=True),
    _both("Qwen/Qwen3-30B-A3B", "TP4 EP", "Qwen3-30B-A3B", quantized=True),
    _both("Qwen/Qwen3-32B", "TP4", "Qwen3-Dense", quantized=True),
    _both("Qwen/Qwen3-8B", "TP1", "Qwen3-Dense"),
    _both("Qwen/Qwen3-VL-8B-Instruct", "TP1", "Qwen-VL-Dense"),
    _both("Qwen/Qwen3-VL-30B-A3B-Instruct", "TP2 EP", "Qwen3-VL-30B-A3B-Instruct"),
    _each(
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        "DP2 TP8 EP",
        "DP4 TP4 EP",
        "Qwen3-VL-235B-A22B-Instruct",
        True,
    ),
    _each("openai/gpt-oss-120b", "TP4 EP", "TP8 EP", "gpt-oss-120b"),
    _both("openai/gpt-oss-20b", "TP1"),
    _both("tencent/Hunyuan-A13B-Instruct", "TP4", "Hunyuan-A13B-Instruct"),
    _both("Qwen/Qwen2.5-VL-7B-Instruct", "TP1"),
    _both("Qwen/Qwen1.5-MoE-A2.7B", "TP1"),
    _both("Qwen/Qwen3-Embedding-0.6B", "TP1", "Qwen3-Embedding"),
    _both("meta-llama/Llama-3.1-8B-Instruct", "TP1"),
    _both("Qwen/Qwen3-0.6B", "TP1", "Qwen3-Dense"),
    _both("zai-org/GLM-4-32B-0414", "TP2"),
    _both("Qwen/Qwen2.5-VL-72B-Instruct", "TP4"),
    _both("meta-llama/Llama-3.1-70B-Instruct", "TP4"),
    _both("Qwen/Qwen2-0.5B-Instruct", "TP1"),
    _both("Qwen/Qwen3-14B", "TP1", "Qwen3-Dense"),
    _both("Qwen/Qwen3-4B", "TP1", "Qwen3-Dense"),
    _both("Qwen/Qwen3-1.7B", "TP1", "Qwen3-Dense"),
    _both("Qwen/Qwen3-VL-4B-Instruct", "TP1", "Qwen-VL-Dense"),
    _both("meta-llama/Meta-Llama-3-8B-Instruct", "TP1"),
    _both("meta-llama/Meta-Llama-3-70B-Instruct", "TP4"),
)
