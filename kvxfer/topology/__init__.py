"""The catalogue of links."""
