"""Checkpoints, configurations and templates that somebody made to do harm, or by mistake."""
