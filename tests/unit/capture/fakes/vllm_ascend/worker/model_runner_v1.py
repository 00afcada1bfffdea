from __future__ import annotations

from torch.distributed import Tensor
from torch_npu import _C
from vllm.compilation.counter import compilation_counter
from vllm.distributed.parallel_state import _TP
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer


class NPUModelRunner(GPUModelRunner):
    with_draft_and_lora = False

    def load_model(self) -> None:
        _C.allocate(100)
        self.model_memory_usage = 100
        if self.with_draft_and_lora:
            AscendSpecDecodeBaseProposer().load_model(self)
            self.load_lora_model()

    def _dummy_run(self, num_tokens: int) -> None:
        if num_tokens == self.max_num_tokens and _TP.device_group is not None:
            _TP.device_group.allreduce([Tensor("npu")])
            _TP.device_group.allreduce([Tensor("npu")])
            _TP.device_group.allreduce([Tensor("npu")])

    def capture_model(self) -> int:
        _C.allocate(7)
        compilation_counter.num_cudagraph_captured += 3
        return 7
