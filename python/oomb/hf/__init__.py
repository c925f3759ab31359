"""Hugging Face models under the engine."""
