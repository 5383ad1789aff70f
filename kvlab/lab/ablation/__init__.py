"""One cache configuration at a time: memory, quality, speed and compression of a case, measured."""
