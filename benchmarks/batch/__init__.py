"""Many requests at once, long prompts during answers, reused prefixes, drafts: this project and two servers."""
