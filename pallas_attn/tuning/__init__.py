"""Measuring configs on the present GPU, and timing for benchmarks."""
