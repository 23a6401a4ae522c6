"""Several processes: how they find each other, agree, and are asked to stop."""
