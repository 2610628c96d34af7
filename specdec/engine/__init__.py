"""Engines: loaded models and their KV caches; packed rows in, logits out.

The common interface and shared parts are at this level: `engine.py`, `batch.py`, row counts, model directories.

- `kv/`: book-keeping of KV memory
- `cpu/`: attention and decoder layers on CPUs; `padded/`: attention on any device
- `gpu/`, `onnx/`, `vllm/`: one engine each
- `heads/`: heads, which guess tokens from the target's states
- `engines/`: the other engines, and the loader for all of them
- `hf/`: models of transformers: loading, layers, checks of their results
- `preflight/`: checks before start-up
"""
