"""Request features that several API dialects share."""
