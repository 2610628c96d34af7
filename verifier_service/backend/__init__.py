"""The seam between the servicer and the backend that runs the target: requests, results, counters."""
