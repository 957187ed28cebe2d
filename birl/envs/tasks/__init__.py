"""Tasks that come with birl: each has its rows, its gold answers and its own check of an answer."""
