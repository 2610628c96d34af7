"""Evaluation of a pair of target and draft on this machine: acceptance, and predicted speed.

The services run their own code on virtual time (`virtual_time.py`), with the real models: a forward pass takes as long
in virtual time as it really took, as if target and draft each had their own device (`timed_engine.py`).
"""
