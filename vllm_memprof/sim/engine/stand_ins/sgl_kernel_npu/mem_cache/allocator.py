"""Cache slots for the new tokens of each request. The caller allocates ``out_indices``."""

from typing import Any

import triton


@triton.jit  # type: ignore[untyped-decorator]
def alloc_extend_kernel(
    prefix_lens: Any,
    seq_lens: Any,
    last_loc: Any,
    free_pages: Any,
    out_indices: Any,
    bs_upper: Any,
    page_size: Any,
    max_num_extend_tokens: Any,
) -> None:
    """Computed on the host, whatever its size: it steers the allocator of the KV cache."""
