"""The chunk loop: exact training with memory that does not grow with the sequence."""
