from hypothesis import settings

settings.register_profile("algorithms", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("algorithms")
