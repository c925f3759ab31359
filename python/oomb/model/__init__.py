"""Hugging Face models, run a chunk at a time: attention, head, angles, the check of structure."""
