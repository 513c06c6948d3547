"""Models of a running server, used as if they were loaded here."""
