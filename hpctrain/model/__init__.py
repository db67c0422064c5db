"""Plain mathematics: transformers whose parameters name their logical dims."""
