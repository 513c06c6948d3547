"""Which of the listed models are loaded, and when: one memory for all of them."""
