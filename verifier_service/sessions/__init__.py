"""Sessions: text, memory, candidates, and their rows of a step."""
