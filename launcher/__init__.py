"""From a command line to agents and processes on machines."""
