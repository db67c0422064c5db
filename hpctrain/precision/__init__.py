"""Number formats below fp32: what is kept in fp32 beside them, and how they are kept from overflowing."""
