"""Evaluation of a pair of target and draft, on the device at hand: what is accepted, how fast it would be served.

The services run their own code on virtual time (`virtual_time.py`), with the models themselves: a forward pass takes
the time that it has really taken, as if target and draft had devices of their own (`timed_engine.py`).
"""
