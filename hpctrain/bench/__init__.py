"""The code that trains, timed."""
