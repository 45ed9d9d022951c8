"""Prefill work and the ratio of transfer to prefill."""
