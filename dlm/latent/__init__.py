"""Latent diffusion: an autoencoder between tokens and vectors, and a flow from noise to those vectors."""
