"""Many requests at once, long prompts during running answers, reused prefixes, drafts: this project and two servers."""
