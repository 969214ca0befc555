"""The command line: `sashiko COMMAND`, also `python -m sashiko COMMAND`."""
