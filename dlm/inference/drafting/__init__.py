"""Drafters: what guesses a request's next tokens, for a causal target to check in one forward. One file each."""
