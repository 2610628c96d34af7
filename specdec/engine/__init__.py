"""Engines: loaded models and their KV caches, packed rows in, logits out.

The seam and what all rooms share stand here: `engine.py`, `batch.py`, row counts, model directories. `kv/` has the
book-keeping of memory, `distributed/` processes that hold parts of one model, `hf/` what is taken from transformers.
`cpu/` and `padded/` hold attention; `gpu/` and `onnx/` an engine each; `engines/` the others, and what loads them all.
"""
