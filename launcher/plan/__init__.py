"""What a command line amounts to: sizes, hosts, roles, backend, and the plan they make. Pure."""
