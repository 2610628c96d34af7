"""Publishing: the commits of the step loop, and their send times."""
