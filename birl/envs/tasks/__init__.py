"""Tasks that come with birl: each brings its rows, its gold answers and its own check of an answer."""
