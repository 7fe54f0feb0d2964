"""The local step fused in Triton: `encode`, `decode` and their checks. The only place that imports triton.

A kernel here computes what `local_step`'s torch functions compute, over all chunks of a stack in one launch. Kernels find
the tensors through a `table.ChunkTable`.
"""
