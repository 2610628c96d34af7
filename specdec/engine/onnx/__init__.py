"""The ONNX Runtime engine, the export of its graphs, and its devices."""
