"""Launchers of the backend "reference": the only production modules that call the oracles."""
