"""Chat in the terminal: conversation, commands, input and output."""
