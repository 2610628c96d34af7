"""A verifier with many users: long prompts, overload, and the breakdown of a step's time."""
