"""Recipes: runs that can be repeated, and whether a repetition gave what the first ones gave."""
