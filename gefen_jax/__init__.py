"""Gefen for JAX: AdamW's recipe with about one byte of optimizer state per parameter."""
