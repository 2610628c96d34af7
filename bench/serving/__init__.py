"""A verifier that many use: long prompts, overload, and where a step's time goes."""
