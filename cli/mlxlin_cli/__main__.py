"""`python -m mlxlin_cli` is the `mlxlin` command."""

from mlxlin_cli.main import main

main()
