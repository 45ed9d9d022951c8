"""Two hosts made of network namespaces, and a link of known rate between them: what kvxfer says is held against it."""
