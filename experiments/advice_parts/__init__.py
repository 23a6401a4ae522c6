"""Which of the three decisions pay on a machine: recorded factorials, priced."""
