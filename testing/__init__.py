"""Support for tests and benchmarks: a bad network, processes, fakes. Not part of the wheel."""
