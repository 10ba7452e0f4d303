"""Other projects' engines behind the same two methods as the built-in one, for comparison on equal terms."""
