"""Every fault at every step: killed, stopped, cut, out of memory, out of files."""
