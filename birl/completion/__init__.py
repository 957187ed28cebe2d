"""`birl completion bash | zsh | fish`: a script that completes birl's command line. It holds every word itself, so that
nothing of birl runs when Tab is pressed: `argcomplete` would start Python each time, and `shtab` completes flags, not
`key=value`, and not for fish."""
