"""What runs before and after the calls of vLLM and vLLM-Ascend that ``hooks.json`` names.

No engine module is imported.
"""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.capture import actions, failure, figures, ray_nodes, residency, steps, transfers
from vllm_memprof.capture.hook import Half
from vllm_memprof.capture.hooks.rows import read_rows

#: By the id of a row; phases open and close where nothing is said.
_ENTER: dict[str, Half | None] = {
    "ray.executor": ray_nodes.enter_executor,
    "ray.workers": ray_nodes.enter_workers,
    "ray.shutdown": ray_nodes.enter_shutdown,
    "w.device_init": actions.begin_device_init,
    "w.weight_load": actions.begin_load_model,
    "r.draft_load": actions.begin_draft_load,
    "w.startup_plan": figures.enter_startup_plan,
    "r.mm_batch": actions.begin_mm_profile,
    "r.mm_batch.v0.11": actions.begin_mm_profile,
    "r.dummy_run": actions.stop_mm_profile,
    "w.kv_connector": actions.begin_kv_connector,
    "w.kv_register": transfers.enter_register,
    "r.graph_capture": actions.begin_graph_capture,
    "w.sleep": residency.enter_sleep,
    "w.wake_up": residency.enter_wake_up,
    "pool.sleep": residency.note_unmapped,
    "w.weight_update.start": residency.enter_update_start,
    "w.weight_update.chunk": residency.enter_update,
    "w.weight_update.finish": None,
    "s.execute": steps.enter_execute,
    "s.mm_encoder": steps.enter_encoder,
    "s.mm_merge": steps.enter_merge,
    "s.add_request": steps.enter_add_request,
    "s.free_request": steps.enter_free_request,
    "core.busy_loop": actions.announce_model,
    "api.serving": actions.announce_server,
    "core.failed_step": failure.enter_failed_step,
}
_LEAVE: dict[str, Half | None] = {
    "role.engine_core": actions.announce_model,
    "w.device_ready": actions.leave_device_ready,
    "ray.executor": ray_nodes.leave_executor,
    "w.weight_load": actions.leave_load_model,
    "r.draft_load": actions.leave_draft_load,
    "load.measured": actions.keep_weights,
    "w.profile_run": actions.leave_profile_run,
    "w.kv_cache_alloc": actions.leave_kv_alloc,
    "w.memory_profiling": actions.keep_profile_result,
    "w.startup_plan": figures.leave_startup_plan,
    "w.kv_groups": figures.keep_groups,
    "w.multi_group": figures.leave_multi_group,
    "w.kv_planner": figures.leave_planner,
    "r.mm_batch": actions.leave_mm_batch,
    "r.mm_batch.v0.11": None,
    "w.kv_connector": transfers.leave_connector,
    "w.kv_register": transfers.leave_register,
    "w.kv_memory": transfers.leave_register_memory,
    "w.kv_transfer": transfers.leave_transfer,
    "w.warm_up": actions.leave_warm_up,
    "r.graph_capture": actions.leave_graph_capture,
    "r.graph_capture.inherited": actions.keep_captured_bytes,
    "w.shutdown": actions.leave_shutdown,
    "pool.sleep": residency.note_unmapped,
    "pool.wake_up": residency.leave_pool_wake_up,
    "w.weight_update.start": residency.leave_update_start,
    "w.weight_update.finish": residency.leave_update_finish,
    "s.execute": steps.leave_execute,
    "s.sample_tokens": steps.leave_sample,
    "s.mm_encoder": steps.leave_stage,
    "s.mm_merge": steps.leave_stage,
    "s.core_step": steps.leave_core_step,
    "s.api_ready": steps.leave_ready,
    "core.kv_caches": actions.leave_kv_caches,
    "core.kv_plan": actions.leave_kv_plan,
    "core.busy_loop": actions.end_core,
}
HOOKS = tuple(read_rows(Path(__file__).parent, _ENTER, _LEAVE))
