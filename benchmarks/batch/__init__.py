"""Many requests at once, long prompts beside running answers, prefixes used again, drafts: this project beside two servers."""
