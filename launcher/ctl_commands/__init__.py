"""What `elasticctl` does: one module for each kind of subcommand, and what they share."""
