"""Several ranks that share one sequence: who runs what, what they send, how they fail together."""
