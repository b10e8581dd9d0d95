"""The `mlxlin` command: text to standard output, everything else to standard error."""
