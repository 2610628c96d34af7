"""Peers: other systems that serve language models, each as a program that answers lines of JSON; see `protocol`.

They run under an interpreter of their own, so nothing here imports specdec.
"""
