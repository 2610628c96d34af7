"""vLLM as an engine: it loads and runs the model, and the verifier's step loop says which rows."""
