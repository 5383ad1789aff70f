"""Launchers of the operations on the CPU."""
