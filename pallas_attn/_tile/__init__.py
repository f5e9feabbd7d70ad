"""What happens inside a kernel, on one tile. Every op builds on it; nothing here knows an op."""
