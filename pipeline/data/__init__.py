"""From raw text to the token store."""
