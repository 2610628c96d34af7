"""The scheduler: chooses the rows of a step and when it begins."""
