"""Container images: the Dockerfiles, what their builds and health checks run, and an example for Compose."""
