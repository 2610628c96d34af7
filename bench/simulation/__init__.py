"""Simulation of the services on a virtual clock: their real code, with modelled devices and a modelled network.

The orchestrator, peer streams, servicers, response queues, both loops, sessions, trees and every policy are real. The
time of a forward pass, the sharing of a device, the language of target and draft, and the transport of a message are
modelled. Processor time is left out, so that a step takes as long as its forward pass.
"""
