"""kvxfer measures what moving an LLM's KV cache between prefill and decode costs."""

__version__ = "0.1.0"
