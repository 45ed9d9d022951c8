"""Two processes that move blocks, and what is measured of it."""
