"""A synthetic Pinterest-like site whose ground truth is known, and which writes its logs day by day."""
