"""Engines: loaded models and their KV caches, packed rows in, logits out.

`gpu/`, `onnx/` and `torch_engine.py` hold one engine each, `distributed/` and `parallel_engine.py` the torch engine in
several processes. `cpu/` and `padded/` hold attention, `hf/` what is taken from transformers, `kv/` the book-keeping of
memory.
"""
