"""vLLM as an engine: it loads and runs the model, while the verifier's step loop chooses the rows."""
