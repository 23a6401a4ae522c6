"""A run goes on with another number of workers."""
