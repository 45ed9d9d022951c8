"""A request's cache in memory: layout, paged pool, block tables, transfer plan."""
