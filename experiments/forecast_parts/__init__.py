"""What `experiments.forecast` foretells: rounds of published runs, and echoing at a speed."""
