"""What a chunk allocates and computes, from a run on tensors without memory."""
