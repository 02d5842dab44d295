"""What a user copies: one file a framework, each with the plugin switched on in one line."""
