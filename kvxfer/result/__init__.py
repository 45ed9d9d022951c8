"""The result: its file format, statistics and tables."""
