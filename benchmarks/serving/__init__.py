"""What HTTP costs: this project's server beside its own engine, and beside two servers of others."""
