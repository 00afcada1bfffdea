"""In place of flash-linear-attention-npu: kernels of linear attention. Runs in engine processes."""
