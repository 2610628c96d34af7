"""The mathematics of decoding: pure functions and one data structure, no I/O, no torch."""
