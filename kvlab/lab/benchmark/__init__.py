"""`kvlab benchmark`: operations timed against the best that is public and against a copy of their bytes."""
