from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed import Tensor
from torch_npu import _C
from vllm.compilation.counter import compilation_counter
from vllm.distributed.parallel_state import _TP
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Model:
    """A model whose encoder takes 60 bytes and keeps 20, and whose merge takes 250."""

    def embed_multimodal(self, **kwargs: Any) -> list[Embedding]:
        _C.allocate(60)
        _C.release(40)
        return [Embedding()]

    def embed_input_ids(
        self, input_ids: list[int], multimodal_embeddings: Any = None, *, is_multimodal: Any = None
    ) -> None:
        if multimodal_embeddings:
            _C.allocate(250)
            _C.release(250)


class Embedding:
    def numel(self) -> int:
        return 10

    def element_size(self) -> int:
        return 2


class NPUModelRunner(GPUModelRunner):
    def __init__(self) -> None:
        self.model = Model()
        self.requests: dict[str, Any] = {}
        self.encoder_cache: dict[str, Embedding] = {}
        vision = SimpleNamespace(patch_size=16)
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(vision_config=vision))

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            self.requests[request.req_id] = request
        embeddings = []
        for name in scheduler_output.scheduled_encoder_inputs:
            embeddings = self.model.embed_multimodal()
            for feature in self.requests[name].mm_features:
                self.encoder_cache[feature.identifier] = embeddings[0]
        self.model.embed_input_ids([1], multimodal_embeddings=embeddings)

    def sample_tokens(self, grammar_output: Any) -> str:
        _C.allocate(1)
        return "tokens"

    def load_model(self) -> None:
        _C.allocate(100)
        self.model_memory_usage = 100

    def _dummy_run(self, num_tokens: int) -> None:
        if num_tokens == self.max_num_tokens and _TP.device_group is not None:
            _TP.device_group.allreduce([Tensor("npu")])
            _TP.device_group.allreduce([Tensor("npu")])
            _TP.device_group.allreduce([Tensor("npu")])

    def capture_model(self) -> int:
        _C.allocate(7)
        compilation_counter.num_cudagraph_captured += 3
        return 7
