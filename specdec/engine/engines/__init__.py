"""Complete engines, assembled from the other sub-packages: torch on one device or several, and the loader for all
kinds."""
