"""What a model's KV cache weighs: shapes from presets and config.json."""
