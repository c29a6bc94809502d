"""Training a DFlash draft for a frozen causal target (arXiv 2602.06036)."""
