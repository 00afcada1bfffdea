"""What runs before and after the calls of SGLang that ``hooks.json`` names.

No engine module is imported. A function that other modules import by name has a target in each of
them: the attribute of the importing module is what counts.
"""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.capture import actions as shared
from vllm_memprof.capture import steps, transfers
from vllm_memprof.capture.hook import Half
from vllm_memprof.capture.hooks.rows import read_rows
from vllm_memprof.engines.sglang import actions, items
from vllm_memprof.engines.sglang import steps as batches

#: By the id of a row; phases open and close where nothing is said.
_ENTER: dict[str, Half | None] = {
    "sgl.role.scheduler": actions.enter_scheduler,
    "sgl.role.detokenizer": actions.become_detokenizer,
    "sgl.role.launcher": actions.enter_launch,
    "sgl.device_init": actions.begin_device_init,
    "sgl.weight_load": actions.begin_load,
    "sgl.kv_sizing": actions.begin_sizing,
    "sgl.request_pool": actions.begin_request_pool,
    "sgl.host_pool": transfers.enter_register,
    "sgl.graph_capture": actions.begin_graph_capture,
    "sgl.update.disk": actions.begin_online,
    "sgl.s.batch": batches.enter_batch,
    "sgl.s.mm_encoder": items.enter_encoder,
    "sgl.s.mm_embedding": items.enter_embedding,
    "sgl.first_steps": actions.enter_first_steps,
    "sgl.end": actions.announce_end,
}
_LEAVE: dict[str, Half | None] = {
    "sgl.role.scheduler": actions.leave_scheduler,
    "sgl.device_init": actions.leave_parallel_runtime,
    "sgl.distributed": actions.leave_distributed,
    "sgl.weight_load": actions.leave_load,
    "sgl.kv_sizing": actions.leave_sizing,
    "sgl.kv_free": actions.keep_available,
    "sgl.kv_reservation": actions.keep_reservation,
    "sgl.mm_cache": actions.keep_embedding_limit,
    "sgl.kv_cell": actions.keep_cell,
    "sgl.kv_configure": actions.leave_configure,
    "sgl.pools": actions.leave_pools,
    "sgl.host_pool": transfers.leave_register,
    "sgl.graph_capture": actions.leave_graph_capture,
    "sgl.shutdown": actions.leave_shutdown,
    "sgl.update.disk": actions.leave_online,
    "sgl.event_loop": actions.leave_event_loop,
    "sgl.s.batch": batches.leave_batch,
    "sgl.s.result": batches.leave_result,
    "sgl.s.mm_encoder": steps.leave_stage,
    "sgl.s.mm_embedding": items.leave_embedding,
    "sgl.s.mm_merge": items.leave_embed,
    "sgl.s.mm_cache": items.leave_cache_set,
    "sgl.first_steps": actions.leave_first_steps,
    "sgl.serving": shared.announce_server,
}
HOOKS = tuple(read_rows(Path(__file__).parent, _ENTER, _LEAVE))
