"""Meet: who am I, who else is here, and what does this machine offer."""
