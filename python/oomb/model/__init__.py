"""Hugging Face models, run a chunk at a time: attention registry, head, angles, the probe."""
