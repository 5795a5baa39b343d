"""One per host: starts, watches and stops workers."""
