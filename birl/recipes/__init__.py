"""Recipes: reproducible runs, with the results that a repetition should give."""
