"""What a model writes in a chat: reasoning, content and calls of tools, told apart."""
