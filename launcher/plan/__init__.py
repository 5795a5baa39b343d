"""The plan of a command line: sizes, hosts, roles and backend. Pure."""
