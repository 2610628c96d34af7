"""Engines: loaded models and their KV caches; packed rows in, logits out.

The common interface and shared parts are at this level: `engine.py`, `batch.py`, row counts, model directories.

- `kv/`: book-keeping of KV memory
- `cpu/`, `padded/`: attention on CPUs, and on any device
- `gpu/`, `onnx/`, `vllm/`: an engine each
- `engines/`: the other engines, and the loader for all of them
- `hf/`: everything based on transformers
- `preflight/`: checks before a start
"""
