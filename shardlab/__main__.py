"""`python -m shardlab` is `shardlab`, where no such command is installed."""

from shardlab.cli import main

main()
