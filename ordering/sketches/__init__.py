"""Sketches of the gradients of single units, which `linear` defines and `backward` computes."""
