"""The checks of `specdec doctor`: packages, machine, ports, cache folder, and whether the given models can be served.

They work with only the client installed, and report missing parts.
"""
