"""The local side: reads recipes, reaches hosts, ships, launches, follows, records, answers."""
