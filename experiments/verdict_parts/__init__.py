"""What the papers claim, what is compared for it, and the rule that decides."""
