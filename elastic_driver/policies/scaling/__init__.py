"""The right number of workers for one job (`--auto-scale`): a pure machine and its parts."""
