"""The local step fused in Triton: `encode`, `decode` and their checks. The only place that imports triton.

A kernel here computes what the functions of `torch_stack` compute, over all chunks of a stack in one launch. Kernels find
the tensors through a `table.ChunkTable`.
"""
