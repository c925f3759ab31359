"""Ordinary training as well as it can be done, for benchmarks that run it beside the engine."""
