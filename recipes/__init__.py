"""What we train: YAML, no logic. The package only carries the files into the wheel."""
