"""The checks of `specdec doctor`: packages, machine, ports, cache folder, and whether given models can be served.

Everything here works with only the client installed, and reports what is missing.
"""
