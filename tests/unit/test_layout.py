"""Parameters that follow from a configuration, against published ones; and what a generated
description quantizes."""

from __future__ import annotations

import math
import re

import pytest

from tests.support.layout import count_parameters
from vllm_memprof.layout import ARCHITECTURES, list_weights
from vllm_memprof.sim.presets import find_preset, list_presets
from vllm_memprof.sim.quantization import RULES, describe

#: Published with the models: the number that the hub shows (metadata of the safetensors files),
#: where its files hold what is loaded. bge-m3: without its pooling layer. Qwen3-0.6B and 1.7B: without the copy of the embedding that
#: their files hold as an output head. DeepSeek-V3: "671B of the Main Model weights"; gpt-oss: 20.91
#: B and 116.83 B in the model card; GLM-4: 32.57 B as llama.cpp counts its files. Qwen2.5-Omni-7B:
#: the part that is loaded, of Qwen2.5-7B (7,615,616,512), the tower of Qwen2.5-VL-7B (676,550,144)
#: and Whisper's encoder with a projection (639,647,232).
PUBLISHED = {
    "allenai/OLMoE-1B-7B-0125-Instruct": 6_919_161_856,
    "BAAI/bge-m3": 567_754_752 - (1024 * 1024 + 1024),
    "BAAI/bge-reranker-v2-m3": 567_755_777,
    "baichuan-inc/Baichuan2-7B-Chat": 7_505_973_248,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "cross-encoder/ms-marco-MiniLM-L6-v2": 22_713_601,
    "deepseek-ai/DeepSeek-OCR": 6_672_212_480 // 2,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "deepseek-ai/DeepSeek-V3.1": 671_026_419_200,
    "facebook/opt-125m": 125_239_296,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-4-26B-A4B-it": 25_805_936_206,
    "google/gemma-4-31B-it": 31_273_088_876,
    "Howeee/Qwen2.5-1.5B-apeach": 1_543_714_304 + 2 * 1536,
    "internlm/internlm2_5-7b-chat": 7_737_708_544,
    "intfloat/multilingual-e5-small": 117_653_760 - (384 * 384 + 384),
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "MiniMaxAI/MiniMax-M2.5": 228_689_764_864,
    "MiniMaxAI/MiniMax-M2.7": 228_689_764_864,
    "MiniMaxAI/MiniMax-M3": 427_040_140_160,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/whisper-large-v3-turbo": 808_878_080,
    "openbmb/MiniCPM-V-4_5": 8_695_895_280,
    "OpenGVLab/InternVL3_5-8B": 8_528_318_464,
    "OpenGVLab/InternVL3_5-8B-HF": 8_528_318_464,
    "Qwen/QVQ-72B-Preview": 73_405_560_320,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen2-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2-VL-72B-Instruct": 73_405_560_320,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-RM-72B": 72_706_203_648 - 152_064 * 8192 + (8192 * 8192 + 2 * 8192 + 1),
    "Qwen/Qwen2.5-Omni-7B": 7_615_616_512 + (8_292_166_656 - 7_615_616_512) + 639_647_232,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-0.6B": 751_632_384 - 151_936 * 1024,
    "Qwen/Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235_093_634_560,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen/Qwen3-Embedding-0.6B": 595_776_512,
    "Qwen/Qwen3-Embedding-4B": 4_021_774_336,
    "Qwen/Qwen3-Embedding-8B": 7_567_295_488,
    "Qwen/Qwen3-Omni-30B-A3B-Thinking": 31_719_205_488,
    "Qwen/Qwen3-Reranker-0.6B": 595_776_512,
    "Qwen/Qwen3-Reranker-4B": 4_021_784_576,
    "Qwen/Qwen3-Reranker-8B": 8_188_548_096,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen/Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/QwQ-32B": 32_763_876_352,
    "rednote-hilab/dots.llm1.inst": 142_774_381_696,
    "tencent/Hunyuan-A13B-Instruct": 80_393_183_232,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "zai-org/GLM-4.5V": 107_710_933_120,
    "zai-org/GLM-4.6V": 107_710_933_120,
    "zai-org/GLM-4.6V-Flash": 10_292_777_472,
}
#: A model that embeds texts has no output head: parameters of one.
HEADLESS = {"Qwen/Qwen3-Embedding-8B": 151_665 * 4096, "Qwen/Qwen2.5-Math-RM-72B": 152_064 * 8192}
#: Published in billions alone, of weights without the layer for multi-token prediction. With two
#: decimals: as llama.cpp counts the files. PaddleOCR-VL: of what is loaded, without the head of its
#: tower; all-MiniLM: 33.4 M without the pooling layer. Qwen3-ASR: the 1.7 B of its name and an encoder
#: of 0.3 B.
BILLIONS = {
    "Qwen/Qwen3-0.6B-Base": 0.6,
    "baichuan-inc/Baichuan2-13B-Chat": 13.9,
    "deepseek-ai/DeepSeek-OCR-2": 3.4,
    "deepseek-ai/DeepSeek-V2.5": 236,
    "internlm/internlm3-8b-instruct": 8.8,
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": 0.9,
    "llava-hf/llava-v1.6-mistral-7b-hf": 7.57,
    "nvidia/Minitron-8B-Base": 8.3,
    "openbmb/MiniCPM-2B-sft-bf16": 2.72,
    "openbmb/MiniCPM4-0.5B": 0.4,
    "Qwen/Qwen2-Audio-7B-Instruct": 8.4,
    "Qwen/Qwen3-ASR-1.7B": 2.0,
    "sentence-transformers/all-MiniLM-L12-v2": 0.0332,
    "tencent/Hy3-preview": 295,
    "deepseek-ai/DeepSeek-V4-Flash": 284,
    "deepseek-ai/DeepSeek-V4-Pro": 1600,
    "MiniMaxAI/MiniMax-M2": 228.69,
    "moonshotai/Kimi-K2-Instruct": 1026.41,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21.83,
    "baidu/ERNIE-4.5-300B-A47B-PT": 300,
    "moonshotai/Kimi-K2-Thinking": 1026.41,
    "OpenGVLab/InternVL3_5-38B": 38.4,
    "OpenGVLab/InternVL3_5-38B-HF": 38.4,
    "OpenGVLab/InternVL3_5-241B-A28B": 240.7,
    "OpenGVLab/InternVL3_5-241B-A28B-HF": 240.7,
    "PaddlePaddle/PaddleOCR-VL": 0.9,
    "moonshotai/Kimi-K2-Instruct-0905": 1026.41,
    "openbmb/MiniCPM3-4B": 4,
    "zai-org/GLM-4.1V-9B-Thinking": 10,
    "zai-org/GLM-5": 744,
    "zai-org/GLM-5.1": 744,
}
#: With the layer for multi-token prediction, which only speculative decoding loads.
WITH_DRAFT = {
    "zai-org/GLM-5.2": 753_329_940_480,
    "zai-org/GLM-5.3-Flash": 321_323_031_390,
    "Qwen/Qwen3.8-2.4T-A95B": 2_446_182_725_504,
    "Qwen/Qwen3.5-0.8B": 873_438_784,
    "Qwen/Qwen3.5-2B": 2_274_069_824,
    "Qwen/Qwen3.5-4B": 4_659_865_088,
    "Qwen/Qwen3.5-9B": 9_653_104_368,
    "Qwen/Qwen3.5-122B-A10B": 125_086_497_008,
    "Qwen/Qwen3.5-397B-A17B": 403_397_928_944,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 81_324_862_720,
    "Qwen/Qwen3.5-27B": 27_781_427_952,
    "Qwen/Qwen3.5-35B-A3B": 35_951_822_704,
}
#: The same, with that layer's copies of embedding and output head.
WITH_COPIES = {
    "zai-org/GLM-4.5": 358_337_791_296,
    "zai-org/GLM-4.5-Air": 110_468_824_832,
    "zai-org/GLM-4.7": 358_337_791_296,
    "zai-org/GLM-4.7-Flash": 31_221_488_576,
}
#: The same of FP8 files: their scales, one for a block of 128 x 128 weights, count as well.
WITH_SCALES = {"deepseek-ai/DeepSeek-V3.2": 685_396_921_376}
#: In billions, with the scales of experts of 4 bits, one for 32 values.
WITH_GROUPS = {"moonshotai/Kimi-K2.5": 1058.59, "Eco-Tech/Kimi-K2.5-W4A8": 1058.59}
#: With those scales, and two of the experts' weights in one number.
PACKED = {"Eco-Tech/Kimi-K3-w4a8": 1_503_647_073_024}


@pytest.mark.parametrize(
    "name", [preset.name for preset in list_presets() if preset.parameters is not None]
)
def test_parameters_are_the_published_ones(name):
    preset = find_preset(name)
    head = HEADLESS.get(name, 0)
    assert preset.parameters == count_parameters(preset.config) - head
    if name in BILLIONS:
        decimals = len(str(BILLIONS[name]).partition(".")[2])
        digits = {1600: -2, 300: -1}.get(BILLIONS[name], decimals)
        assert round(preset.parameters / 1e9, digits) == BILLIONS[name]
    elif name in WITH_GROUPS | PACKED:
        sizes = {key: math.prod(shape) for key, shape in list_weights(preset.config).items()}
        experts = sum(size for key, size in sizes.items() if ".experts." in key)
        numbers = preset.parameters + experts // 32
        if name in WITH_GROUPS:
            assert round(numbers / 1e9, 2) == WITH_GROUPS[name]
        else:
            assert numbers - experts // 2 == PACKED[name]
    elif name in WITH_COPIES | WITH_SCALES:
        copies = 2 * preset.config["vocab_size"] * preset.config["hidden_size"]
        whole = count_parameters(preset.config, draft=True) + copies
        if name in WITH_COPIES:
            assert whole == WITH_COPIES[name]
        else:
            assert 0 < WITH_SCALES[name] - whole < whole / 128**2
    elif name in WITH_DRAFT:
        assert count_parameters(preset.config, draft=True) == WITH_DRAFT[name]
    else:
        assert preset.parameters == PUBLISHED[name]


def test_the_draft_of_deepseek():
    """Published as 14 B, which counts its copies of embedding and output head."""
    config = find_preset("deepseek-ai/DeepSeek-V3").config
    draft = count_parameters(config, draft=True) - count_parameters(config)
    assert round((draft + 2 * config["vocab_size"] * config["hidden_size"]) / 1e9, 1) == 13.5


def test_a_model_without_preset():
    """Qwen2.5-7B: 7,615,616,512 parameters on the hub."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    assert count_parameters(config) == 7_615_616_512
    assert count_parameters({**config, "model_type": "another"}) is None


def quantized(name):
    """Weights of a preset by their type in its description, the experts that the engine does not
    ask for included."""
    config = find_preset(name).config
    description = describe(config)
    found = {}
    for weight, shape in list_weights(config).items():
        type_ = description[re.sub(r"\.experts\.\d+\.", ".experts.0.", weight)]
        found.setdefault(type_, {})[weight] = math.prod(shape)
    return found


def test_everything_that_weighs_is_quantized_in_a_dense_model():
    found = quantized("Qwen/Qwen3-32B")
    assert set(found) == {"W8A8", "FLOAT"}
    rest = {re.sub(r"layers\.\d+\.", "", name) for name in found["FLOAT"]}
    assert rest == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.input_layernorm.weight",
        "model.post_attention_layernorm.weight",
        "model.self_attn.q_norm.weight",
        "model.self_attn.k_norm.weight",
    }
    assert sum(found["W8A8"].values()) / find_preset("Qwen/Qwen3-32B").parameters > 0.95


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-VL-30B-A3B-Instruct"]
)
def test_experts_are_scaled_per_token(name):
    found = quantized(name)
    assert {weight for weight in found["W8A8_DYNAMIC"] if ".experts." in weight} == {
        weight for weight in list_weights(find_preset(name).config) if ".experts." in weight
    }
    assert all(".self_attn." in weight for weight in found["W8A8"])
    assert not [weight for weight in found["FLOAT"] if ".experts." in weight]
    assert [weight for weight in found["FLOAT"] if weight.endswith("mlp.gate.weight")]
    assert not [
        weight
        for type_ in ("W8A8", "W8A8_DYNAMIC")
        for weight in found[type_]
        if "visual" in weight
    ]


def test_layers_for_speculative_decoding_stay():
    description = describe(find_preset("deepseek-ai/DeepSeek-V3").config)
    assert description["model.layers.60.mlp.experts.0.up_proj.weight"] == "W8A8_DYNAMIC"
    assert description["model.layers.61.mlp.experts.0.up_proj.weight"] == "FLOAT"
    assert description["model.layers.61.self_attn.o_proj.weight"] == "FLOAT"


def test_parts_of_a_fused_layer_are_of_one_type():
    """The engine fuses them, and refuses a layer of two types."""
    fused = [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ]
    kinds = {preset.config["model_type"]: preset for preset in list_presets()}
    for preset in kinds.values():
        description = describe(preset.config)
        if description is None:
            continue
        for first, *others in fused:
            for name in [name for name in description if name.endswith(f".{first}.weight")]:
                assert {description[name.replace(first, other)] for other in others} == {
                    description[name]
                }


def test_every_rule_is_of_a_known_kind():
    assert set(RULES) <= set(ARCHITECTURES)
