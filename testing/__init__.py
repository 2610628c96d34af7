"""Support for tests and benchmarks: virtual time, a bad network, processes, fakes. Not part of the wheel."""
