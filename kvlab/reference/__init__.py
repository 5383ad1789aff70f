"""Oracles: every operation once more, in plain NumPy, float64 where it computes, written for reading.

These functions import nothing but NumPy. They are the `"reference"` backend, what the tests compare every
kernel with, and the place to look up what an operation means.
"""
