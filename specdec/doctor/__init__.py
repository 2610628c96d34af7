"""The checks of `specdec doctor`: packages, machine, ports, cache folder, and whether given models can be served.

Everything here works where only the client is installed, and says what is missing.
"""
