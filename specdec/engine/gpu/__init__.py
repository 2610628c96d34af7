"""The engine for GPUs: split-KV batches, Triton kernels, CUDA graphs, and sampling from logits on the GPU."""
