"""Everything that is shipped to a host. It runs there alone and imports nothing of ours but itself."""
