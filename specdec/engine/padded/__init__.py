"""Attention over padded batches by tensor operations: for `eager`, and for ONNX graphs."""
