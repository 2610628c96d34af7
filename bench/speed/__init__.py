"""Speed of generation: specdec in several configurations, and other systems."""
