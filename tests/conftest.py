"""For all tests: pytest puts this folder on the path, so that every test can `import requirements`."""

from __future__ import annotations

from hypothesis import settings

# These machines are shared: how long one example takes says nothing about the code.
settings.register_profile("kvxfer", deadline=None)
settings.load_profile("kvxfer")
