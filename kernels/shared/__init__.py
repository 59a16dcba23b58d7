"""Parts that several operators are made of."""
