"""Running a model over packed batches: memory, layout and the two engines."""
