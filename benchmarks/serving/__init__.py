"""The cost of HTTP: this project's server compared with its engine and with two other servers."""
