"""What goes into a step, and when the step begins."""
