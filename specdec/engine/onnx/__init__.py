"""The ONNX Runtime engine, the export that it runs, and its devices."""
