"""A KV cache that keeps tokens at several widths under a byte budget: importance, allocation, pages."""
