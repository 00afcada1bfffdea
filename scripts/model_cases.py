"""The models of docs/models.md: on how many devices each is planned, and who recommends that.

Data only. A model is there as the page recommends it, in W8A8 where it names such a checkpoint for
these devices. ``page`` is a page of vllm-ascend's tutorials
(docs/source/tutorials/models), or of their tests; "" where none names the model: then it is the
least number of devices that people use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

STACKS = ("vllm-ascend-0.23.0", "vllm-ascend-0.30.0rc2")
#: Device profiles, and their names in the page.
DEVICES = {"910b": "910B", "a3": "A3"}
#: Context of the models that do not have 32,768 tokens.
LENGTH = 32768
SHORTER = {
    "BAAI/bge-m3": 8192,
    "BAAI/bge-reranker-v2-m3": 8192,
    "microsoft/phi-4": 16384,
    "Qwen/Qwen1.5-MoE-A2.7B": 8192,
    "deepseek-ai/DeepSeek-OCR": 8192,
    "google/gemma-2-2b-it": 8192,
    "google/gemma-2-9b-it": 8192,
    "google/gemma-2-27b-it": 8192,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8192,
    "meta-llama/Meta-Llama-3-70B-Instruct": 8192,
    "allenai/OLMoE-1B-7B-0125-Instruct": 4096,
    "baichuan-inc/Baichuan2-13B-Chat": 4096,
    "baichuan-inc/Baichuan2-7B-Chat": 4096,
    "cross-encoder/ms-marco-MiniLM-L6-v2": 512,
    "deepseek-ai/DeepSeek-OCR-2": 8192,
    "facebook/opt-125m": 2048,
    "intfloat/multilingual-e5-small": 512,
    "meta-llama/Llama-2-7b-hf": 4096,
    "meta-llama/Llama-2-13b-hf": 4096,
    "microsoft/Phi-3-mini-4k-instruct": 4096,
    "nvidia/Minitron-8B-Base": 4096,
    "openai/whisper-large-v3-turbo": 448,
    "openbmb/MiniCPM-2B-sft-bf16": 4096,
    "Qwen/Qwen2-Audio-7B-Instruct": 8192,
    "Qwen/Qwen2.5-Math-RM-72B": 4096,
    "Qwen/Qwen3-ASR-1.7B": 4096,
    "sentence-transformers/all-MiniLM-L12-v2": 512,
}


@dataclass(frozen=True)
class Case:
    """One model on the devices of one kind: TP, and DP where it is not 1, and EP."""

    model: str
    parallel: dict[str, str]  # profile -> "DP4 TP4 EP"
    page: str = ""
    quantized: bool = False  # W8A8
    also: tuple[str, ...] = ()  # other presets with the same configuration
    more: str = ""  # other arguments of the engine
    stacks: tuple[str, ...] = STACKS

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
        words += [self.more] if self.more else []
        return " ".join(words)

    @property
    def name(self) -> str:
        """Name in the page."""
        named = [self.model, *self.also, *(["W8A8"] if self.quantized else [])]
        if "--skip-mm-profiling" in self.more:
            named.append("no images")
        if self.stacks[0] != STACKS[0]:
            named.append(self.stacks[0].removeprefix("vllm-ascend-"))
        return ", ".join(named)


def _both(
    model: str,
    parallel: str = "TP1",
    page: str = "",
    quantized: bool = False,
    also: tuple[str, ...] = (),
    more: str = "",
    stacks: tuple[str, ...] = STACKS,
) -> Case:
    return Case(model, dict.fromkeys(DEVICES, parallel), page, quantized, also, more, stacks)


#: The same on the first stack alone.
_first = partial(_both, stacks=STACKS[:1])


def _each(
    model: str,
    a2: str,
    a3: str,
    page: str,
    quantized: bool = False,
    also: tuple[str, ...] = (),
) -> Case:
    return Case(model, {"910b": a2, "a3": a3}, page, quantized, also)


def _a2(
    model: str,
    parallel: str,
    page: str = "",
    quantized: bool = False,
    also: tuple[str, ...] = (),
    more: str = "",
    stacks: tuple[str, ...] = STACKS[:1],
) -> Case:
    return Case(model, {"910b": parallel}, page, quantized, also, more, stacks)


_ONE_IMAGE = '--limit-mm-per-prompt \'{"image":1,"video":0}\''
_DEEPSEEK = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.1")
#: How vllm-ascend's pages start models that embed and rank texts.
_POOLING = "--runner pooling"
_RANKING = (
    "--runner pooling --hf-overrides '"
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}\''
)
_RANKING_IMAGES = _RANKING.replace("Qwen3For", "Qwen3VLFor")


CASES = (
    _both("Qwen/Qwen2.5-Omni-7B", "TP1"),
    _both("Qwen/Qwen3.5-27B", "TP2", "Qwen3.5-27B-Qwen3.6-27B", quantized=True),
    _both("Qwen/Qwen3.5-35B-A3B", "TP2 EP", "Qwen3.6-35B-A3B", quantized=True),
    _each("zai-org/GLM-4.5-Air", "TP8 EP", "DP2 TP8 EP", "GLM4.x", quantized=True),
    _each(
        "MiniMaxAI/MiniMax-M2",
        "TP8 EP",
        "DP4 TP4 EP",
        "MiniMax-M2",
        True,
        ("MiniMaxAI/MiniMax-M2.5",),
    ),
    _both("moonshotai/Kimi-K2-Instruct", "DP4 TP8 EP", "multi_node_kimi (0.11)", quantized=True),
    _both("openbmb/MiniCPM3-4B", "TP1"),
    _both("deepseek-ai/DeepSeek-V3", "DP4 TP4 EP", "DeepSeek-V3.1", True, _DEEPSEEK),
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
    _a2("Qwen/Qwen3-0.6B-Base", "TP1"),
    _a2("Qwen/Qwen2.5-0.5B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-1.5B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-3B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-7B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-14B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-32B-Instruct", "TP2"),
    _a2("Qwen/Qwen2.5-72B-Instruct", "TP4"),
    _a2("Qwen/QwQ-32B", "TP2"),
    _a2("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "TP1"),
    _a2("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "TP1"),
    _a2("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "TP1"),
    _a2("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "TP2"),
    _a2("deepseek-ai/DeepSeek-V3.2", "DP2 TP16 EP", "DeepSeek-V3.2", True),
    _a2("zai-org/GLM-4.7", "DP2 TP8 EP", "GLM4.x", True),
    _a2("zai-org/GLM-4.5", "DP2 TP8 EP", "GLM4.x", True),
    _a2("zai-org/GLM-4.7-Flash", "TP2"),
    _a2("zai-org/GLM-5.2", "DP2 TP16 EP", "", True),
    _a2("Qwen/Qwen3-30B-A3B-Instruct-2507", "TP4 EP", "Qwen3-30B-A3B"),
    _a2("Qwen/Qwen3-235B-A22B-Instruct-2507", "TP8 EP", "Qwen3-235B-A22B", True),
    _a2("Qwen/Qwen3-Coder-30B-A3B-Instruct", "TP4 EP", "Qwen3-Coder-30B-A3B", True),
    _a2("Qwen/Qwen3-Coder-480B-A35B-Instruct", "TP16 EP", "", True),
    _a2("Qwen/Qwen3-4B-Instruct-2507", "TP1"),
    _a2("Qwen/Qwen3-VL-2B-Instruct", "TP1", "Qwen-VL-Dense"),
    _a2("Qwen/Qwen3-VL-32B-Instruct", "TP4", "Qwen-VL-Dense"),
    _a2("Qwen/Qwen3.5-122B-A10B", "TP8 EP", "", True),
    _a2("Qwen/Qwen3.5-397B-A17B", "TP16 EP", "Qwen3.5-397B-A17B", True),
    _a2("MiniMaxAI/MiniMax-M2.7", "TP8 EP", "MiniMax-M2", True),
    _a2("meta-llama/Llama-3.2-1B-Instruct", "TP1"),
    _a2("meta-llama/Llama-3.2-3B-Instruct", "TP1"),
    _a2("Qwen/Qwen3-Embedding-4B", "TP1", "Qwen3-Embedding", more=_POOLING),
    _a2("Qwen/Qwen3-Embedding-8B", "TP1", "Qwen3-Embedding", more=_POOLING),
    _a2("Qwen/Qwen3-Reranker-0.6B", "TP1", "Qwen3-Reranker", more=_RANKING),
    _a2("Qwen/Qwen3-Reranker-4B", "TP1", "Qwen3-Reranker", more=_RANKING),
    _a2("Qwen/Qwen3-Reranker-8B", "TP1", "Qwen3-Reranker", more=_RANKING),
    _a2("deepseek-ai/DeepSeek-V4-Pro", "DP4 TP16 EP", "DeepSeek-V4-Pro", True),
    _a2("Qwen/Qwen3.5-0.8B", "TP1", "Qwen3.5-Dense"),
    _a2("Qwen/Qwen3.5-2B", "TP1", "Qwen3.5-Dense"),
    _a2("Qwen/Qwen3.5-4B", "TP1", "Qwen3.5-Dense"),
    _a2("Qwen/Qwen3.5-9B", "TP1", "Qwen3.5-Dense"),
    _a2("Qwen/Qwen2-VL-2B-Instruct", "TP1"),
    _a2("Qwen/Qwen2-VL-7B-Instruct", "TP1"),
    _a2("Qwen/Qwen2-VL-72B-Instruct", "TP4"),
    _a2("Qwen/Qwen2.5-VL-3B-Instruct", "TP1"),
    _a2("Qwen/Qwen2.5-VL-32B-Instruct", "TP2"),
    _a2("moonshotai/Kimi-K2-Instruct-0905", "DP4 TP8 EP", quantized=True),
    _a2("baidu/ERNIE-4.5-0.3B-PT", "TP1"),
    _a2("baidu/ERNIE-4.5-21B-A3B-PT", "TP1"),
    _a2("mistralai/Mistral-7B-Instruct-v0.3", "TP1"),
    _a2("mistralai/Mixtral-8x7B-Instruct-v0.1", "TP4", "Mixtral-8x7B-Instruct-v0.1"),
    _a2("microsoft/phi-4", "TP1"),
    _a2("Qwen/Qwen3-Omni-30B-A3B-Thinking", "TP4 EP", "Qwen3-Omni-30B-A3B-Thinking"),
    _a2("OpenGVLab/InternVL3_5-8B-HF", "TP1", "InternVL3.5"),
    _a2("moonshotai/Kimi-K2-Thinking", "TP16 EP", "Kimi-K2-Thinking"),
    _a2("moonshotai/Kimi-K2.5", "TP16 EP"),
    _a2("Eco-Tech/Kimi-K2.5-W4A8", "DP4 TP4 EP", "Kimi-K2.5"),
    _a2("google/gemma-3-4b-it", "TP1"),
    _a2("google/gemma-3-12b-it", "TP1"),
    _a2("google/gemma-3-27b-it", "TP2"),
    _a2("google/gemma-4-26B-A4B-it", "TP4", "Gemma4"),
    _a2("google/gemma-4-31B-it", "TP4", "Gemma4"),
    _a2("google/gemma-2-2b-it", "TP1"),
    _a2("google/gemma-2-9b-it", "TP1"),
    _a2("google/gemma-2-27b-it", "TP2"),
    _a2("zai-org/GLM-4.5V", "TP8 EP", more="--mm-encoder-tp-mode data"),
    _a2("baidu/ERNIE-4.5-300B-A47B-PT", "TP16 EP"),
    _a2("OpenGVLab/InternVL3_5-38B-HF", "TP4", "InternVL3.5"),
    _a2("PaddlePaddle/PaddleOCR-VL", "TP1", "PaddleOCR-VL"),
    _a2("deepseek-ai/DeepSeek-OCR", "TP1"),
    _a2("BAAI/bge-m3", "TP1", more=_POOLING),
    _a2("BAAI/bge-reranker-v2-m3", "TP1", more=_POOLING),
    _both("deepseek-ai/DeepSeek-V2-Lite", page="(tests/e2e)"),
    _both("deepseek-ai/DeepSeek-V2-Lite", page="(tests/e2e)", quantized=True),
    _first("deepseek-ai/DeepSeek-V2.5", "TP16 EP"),
    _first("Qwen/Qwen3-VL-Embedding-2B", page="Qwen3-VL-Embedding", more=_POOLING),
    _first("Qwen/Qwen3-VL-Embedding-8B", page="Qwen3-VL-Embedding", more=_POOLING),
    _first("Qwen/Qwen3-VL-Reranker-2B", page="Qwen3-VL-Reranker", more=_RANKING_IMAGES),
    _first("Qwen/Qwen3-VL-Reranker-8B", page="Qwen3-VL-Reranker", more=_RANKING_IMAGES),
    _first("Qwen/Qwen2.5-Math-RM-72B", "TP4", "Qwen2.5-Math-RM-72B", more=_POOLING),
    _first("Howeee/Qwen2.5-1.5B-apeach", page="(tests/e2e)", more=_POOLING),
    _first("microsoft/Phi-4-mini-instruct"),
    _first("microsoft/Phi-3.5-mini-instruct"),
    _first("internlm/internlm3-8b-instruct", page="(tests/e2e)"),
    _first("internlm/internlm2_5-7b-chat"),
    _first("baichuan-inc/Baichuan2-7B-Chat"),
    _first("baichuan-inc/Baichuan2-13B-Chat"),
    _first("openbmb/MiniCPM4-0.5B", page="(tests/e2e)"),
    _first("openbmb/MiniCPM-2B-sft-bf16", page="(tests/e2e)"),
    _first("meta-llama/Llama-2-7b-hf"),
    _first("meta-llama/Llama-2-13b-hf"),
    _first("allenai/OLMoE-1B-7B-0125-Instruct", page="(tests/e2e)"),
    _first("Qwen/Qwen2-Audio-7B-Instruct", page="(tests/e2e)"),
    _first("Qwen/Qwen3-ASR-1.7B", page="Qwen3-ASR-1.7B"),
    _first("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "TP2"),
    _first("llava-hf/llava-v1.6-mistral-7b-hf"),
    _first("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", page="LLaVA-OneVision-Qwen2-0.5B-OV"),
    _first("nvidia/Minitron-8B-Base", page="Minitron-8B-Base"),
    _first("tencent/Hy3-preview", "TP16 EP", "Hy3-preview"),
    _both("deepseek-ai/DeepSeek-OCR-2", page="DeepSeekOCR2"),
    _first("sentence-transformers/all-MiniLM-L12-v2", page="(tests/e2e)", more=_POOLING),
    _first("intfloat/multilingual-e5-small", page="(tests/e2e)", more=_POOLING),
    _first("cross-encoder/ms-marco-MiniLM-L6-v2", page="(tests/e2e)", more=_POOLING),
    _first("openai/whisper-large-v3-turbo", page="(tests/e2e)"),
    _first("facebook/opt-125m", page="(tests/e2e)"),
    _first("microsoft/Phi-3-mini-4k-instruct"),
    _first("Qwen/QVQ-72B-Preview", "TP4"),
    _first("zai-org/GLM-4.6V", "TP8 EP", more="--mm-encoder-tp-mode data"),
    _first("zai-org/GLM-4.1V-9B-Thinking"),
    _first("zai-org/GLM-4.6V-Flash"),
    _first("OpenGVLab/InternVL3_5-8B", page="InternVL3.5"),
    _first("OpenGVLab/InternVL3_5-38B", "TP4", "InternVL3.5"),
    _first("OpenGVLab/InternVL3_5-38B", "TP4", "InternVL3.5", quantized=True),
    _first("OpenGVLab/InternVL3_5-241B-A28B", "DP2 TP4 EP", "InternVL3.5", quantized=True),
    _first("OpenGVLab/InternVL3_5-241B-A28B-HF", "TP16 EP", "InternVL3.5"),
    Case(
        "MiniMaxAI/MiniMax-M3",
        {"910b": "TP8 EP", "a3": "DP4 TP4 EP"},
        "MiniMax-M3",
        True,
        more=_ONE_IMAGE,
        stacks=STACKS[1:],
    ),
    _both("Qwen/Qwen3.8-2.4T-A95B", "DP4 TP16 EP", "Qwen3.8-2.4T-A95B", True, stacks=STACKS[1:]),
    _both("zai-org/GLM-5.3-Flash", "TP8 EP", quantized=True, stacks=STACKS[1:]),
    _first("openbmb/MiniCPM-V-4_5", more="--skip-mm-profiling"),
    _first("rednote-hilab/dots.llm1.inst", "TP8 EP"),
    _a2("Eco-Tech/Kimi-K3-w4a8", "DP8 TP8 EP", "Kimi-K3", stacks=STACKS[1:]),
)
