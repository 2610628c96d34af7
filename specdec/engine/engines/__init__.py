"""Complete engines, assembled from the other sub-packages: torch on any device, and the loader for all kinds."""
