"""A folder that stands first in the PYTHONPATH of workers, with `--ports`."""
