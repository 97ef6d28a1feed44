"""One attention, one block, three families."""
