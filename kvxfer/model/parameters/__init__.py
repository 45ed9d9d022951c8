"""How many parameters a model has, from its config.json: a file per part of a model, and one per odd family."""
