"""Whether models trained by chunks find what is far back; see run.py."""
