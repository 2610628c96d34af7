"""How fast texts come: specdec beside other systems, and beside itself in other configurations."""
