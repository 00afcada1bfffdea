"""Kernels that compute on the host: the few whose results the engine needs for right tokens.

Device memory is host memory, so a tensor of the device can be read and written here. A launch
computes when its kernel has a row in ``HOST`` and the tensors that it writes are within
``host_compute_bytes`` of the device profile, or its row has no limit; else it does nothing. The
stream is waited for first, so that what was launched before is there; a stream that records a graph
is left alone.
"""

import ctypes
import itertools
import os
import sys

from .._host import device_profile
from . import compute_drafts, compute_sglang
from .marks import writes

_FAILED = (
    set()
)  # kernels that could not be computed: in another release they may take other arguments


def launch(kernel, grid, args, kwargs):
    """Computes a launch of ``kernel`` (a ``JITFunction``), or does nothing."""
    host = HOST.get(kernel.fn.__name__)
    if host is None or kernel.fn.__name__ in _FAILED:
        return
    if not set(host.written) <= set(kernel.arg_names):
        return  # another package has a kernel of that name
    import torch

    given = kernel.signature.bind(
        *args, **{name: kwargs[name] for name in kwargs if name in kernel.arg_names}
    ).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if not tensors or any(
        type(each) not in (torch.Tensor, torch.nn.Parameter) for each in tensors.values()
    ):
        return  # traced, not run
    if (
        any(each.device.type != "npu" for each in tensors.values())
        or torch.npu.is_current_stream_capturing()
    ):
        return
    limit = int(device_profile().get("host_compute_bytes") or 0)
    if not host.any_size and any(
        tensors[name].nbytes > limit for name in host.written if name in tensors
    ):
        return
    torch.npu.current_stream().synchronize()
    try:
        with torch.no_grad():
            host(
                **{
                    name: _host_view(value) if name in tensors else value
                    for name, value in given.items()
                },
                grid=grid,
            )
        _tell_poison(tensors, host.written)
    except IndexError:
        return  # a dummy run: its positions or blocks are nobody's
    except Exception as error:
        _FAILED.add(kernel.fn.__name__)
        print(
            f"memprof: {kernel.fn.__name__} computes nothing from here on: {error!r}",
            file=sys.stderr,
            flush=True,
        )


def _host_view(tensor):
    """The same memory as a tensor of the CPU, with the same shape and strides."""
    import torch

    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * (_reach(tensor) * tensor.element_size())).from_address(
        tensor.data_ptr()
    )
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _tell_poison(tensors, written):
    """Tells the simulated device what was read and written past it; only its poison mode asks."""
    if "MEMPROF_SIM_POISON" not in os.environ:
        return

    def ranges(chosen):
        spans = [(each.data_ptr(), _reach(each) * each.element_size()) for each in chosen]
        arrays = ((ctypes.c_uint64 * len(spans))(*column) for column in zip(*spans, strict=True))
        return [*(arrays if spans else (None, None)), ctypes.c_uint64(len(spans))]

    results = [tensors[each] for each in written if each in tensors]
    ctypes.CDLL("libascendcl.so").memprof_sim_host_kernel(
        *ranges(list(tensors.values())), *ranges(results)
    )


def _reach(tensor):
    """Elements from the first to the last of a tensor, gaps of its strides included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@writes("q_ptr", "k_ptr")
def _rope(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    cos_sin_ptr,
    pos_ptr,
    num_tokens,
    hd,
    rope_dim,
    IS_NEOX_STYLE,
    USE_COS_SIN,
    **_,
):
    """Rotary embedding of queries and keys in place. (vllm_ascend/ops/triton/rope.py::_triton_rope,
    0.23.0)"""
    half = rope_dim // 2
    if USE_COS_SIN:
        table = cos_sin_ptr[pos_ptr[:num_tokens].long()].float()
        cos, sin = table[:, :half], table[:, half:rope_dim]
    else:
        cos, sin = cos_ptr[:num_tokens, :half].float(), sin_ptr[:num_tokens, :half].float()
    cos, sin = cos[:, None], sin[:, None]
    for given in (q_ptr, k_ptr):
        rows = given[:num_tokens].view(num_tokens, -1, hd)
        if IS_NEOX_STYLE:
            first, second = rows[..., :half], rows[..., half:rope_dim]
        else:
            first, second = rows[..., 0:rope_dim:2], rows[..., 1:rope_dim:2]
        left, right = first.float(), second.float()
        turned = left * cos - right * sin, right * cos + left * sin
        first.copy_(turned[0])
        second.copy_(turned[1])


@writes("slot_mapping_ptr")
def _slot_mapping(num_tokens, max_num_tokens, query_start_loc_ptr, positions_ptr, block_table_ptr,
                  block_size,
                  slot_mapping_ptr, TOTAL_CP_WORLD_SIZE, TOTAL_CP_RANK,
                  CP_KV_CACHE_INTERLEAVE_SIZE, PAD_ID,
                  grid, **_):  # fmt: skip
    """The cache slot of every token. (vllm/v1/worker/block_table.py::_compute_slot_mapping_kernel,
    0.23.0)"""
    import torch

    slots = slot_mapping_ptr.view(-1)
    starts = query_start_loc_ptr[
        : grid[0]
    ].tolist()  # a program for each request, and one that pads
    interleave, world = CP_KV_CACHE_INTERLEAVE_SIZE, TOTAL_CP_WORLD_SIZE
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        positions = positions_ptr[start:end].long()
        blocks = positions // (block_size * world)
        within = positions - blocks * block_size * world
        local = within // (world * interleave) * interleave + within % interleave
        found = block_table_ptr[request, blocks].long() * block_size + local
        slots[start:end] = torch.where(within // interleave % world == TOTAL_CP_RANK, found, PAD_ID)
    slots[num_tokens:max_num_tokens] = PAD_ID


#: Name of a kernel -> what computes it, called with the kernel's own arguments.
HOST = {
    "_triton_rope": _rope,
    "_compute_slot_mapping_kernel": _slot_mapping,
    **compute_drafts.ROWS,
    **compute_sglang.ROWS,
}
