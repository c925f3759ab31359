"""The engine: one model, trained on sequences of any length, with calls that are planned."""
