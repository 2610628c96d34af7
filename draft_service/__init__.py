"""The draft service: a small model that expands a tree of candidates ahead of the target."""
