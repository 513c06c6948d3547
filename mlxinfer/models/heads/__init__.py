"""Draft heads: MTP, EAGLE-3 and Gemma 4's assistant."""
