"""The scheduler: chooses what goes into a step, and when the step begins."""
