"""Between the drafter hub and its drafters: messages, connections, credentials."""
