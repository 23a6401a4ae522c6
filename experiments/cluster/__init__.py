"""Runs over several processes: connecting them, checking that they agree, stopping them."""
