"""The `ds-bert` command: one thin module for each subcommand."""
