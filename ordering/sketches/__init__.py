"""Sketches of the gradients of single units: `backward` computes them, `linear` defines them."""
