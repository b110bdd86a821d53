"""Documents of the search: its rounds and its history."""
