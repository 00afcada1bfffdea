"""Cache slots for the new tokens of each request. The caller allocates ``out_indices``."""

import triton


@triton.jit
def alloc_extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    out_indices,
    bs_upper,
    page_size,
    max_num_extend_tokens,
):
    """Computed on the host, whatever its size: it steers the allocator of the KV cache."""
