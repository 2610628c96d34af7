"""The services on a virtual clock: their own code, with modelled devices and a modelled network.

What is real: orchestrator, links, servicers, outboxes, both loops, sessions, trees, every policy. What is a model:
how long a forward pass takes, who has a device that two want, the language that target and draft speak, the way of a
message. What is left out: the time that processors spend on all of this, so that a step takes as long as its forward
pass.
"""
