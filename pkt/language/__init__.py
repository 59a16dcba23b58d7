"""Device code: what a kernel imports as `pl`."""
