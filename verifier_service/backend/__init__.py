"""The seam between the servicer and whatever runs the target: requests, results, counters."""
