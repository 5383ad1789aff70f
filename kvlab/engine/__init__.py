"""Decoding of one token of a whole model; so far how its weights lie in memory (`kvlab.engine.weights`)."""
