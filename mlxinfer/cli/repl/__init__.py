"""The chat in the terminal: the conversation, its commands, reading lines and writing answers."""
