"""What an order observes: gradients of single units in `examples`, their sketches in `backward`."""
