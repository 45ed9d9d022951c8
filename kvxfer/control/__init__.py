"""The channel over which the two sides agree what to do."""
