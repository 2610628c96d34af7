"""Container images: a Dockerfile for each role, what their builds and health checks run, and an example for Compose."""
