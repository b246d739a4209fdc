"""Building blocks that model definitions share."""
