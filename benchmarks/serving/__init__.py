"""What HTTP costs: this project's server compared with its own engine and with two other servers."""
