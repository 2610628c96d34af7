"""Speed of generation: specdec beside other systems, and in several configurations."""
