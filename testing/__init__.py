"""Support for tests and benchmarks: virtual time, a bad network, processes, stand-ins. Not part of the wheel."""
