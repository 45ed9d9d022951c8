"""The Python face of the native backends."""
