"""The subcommands of `elasticctl`."""
