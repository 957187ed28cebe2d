"""`birl completion bash | zsh | fish`: a script that completes birl's command line. It contains all words, so that Tab
does not start Python: `argcomplete` would each time, and `shtab` completes flags only, not `key=value`, and not for
fish."""
