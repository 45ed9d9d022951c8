"""One file per tool: `offers(environment)` says what it brings here, `Side` is one side of it (see offer.py)."""
