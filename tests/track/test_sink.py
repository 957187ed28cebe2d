from birl.track.sink import HIDDEN, public


def test_what_opens_doors_is_not_told() -> None:
    config = {
        "env.api_key": "abc",
        "env.options": {"login": {"Password": "x", "user": "me"}},
        "reward.judge": "http://me:pw@host:80/v1#model",
        "engine.urls": ["https://h/v1?api_key=abc&a=1", "http://plain/v1"],
        "hub_token": "hf_x",
    }
    told = public(config)
    assert told["env.api_key"] == told["hub_token"] == told["env.options"]["login"]["Password"] == HIDDEN
    assert told["reward.judge"] == f"http://{HIDDEN}@host:80/v1#model"
    assert told["engine.urls"] == [f"https://h/v1?api_key={HIDDEN}&a=1", "http://plain/v1"]
    assert told["env.options"]["login"]["user"] == "me"


def test_keys_that_only_sound_like_it_stay() -> None:
    config = {
        "rollout.max_tokens": 256,
        "algorithm.denominator": "token",
        "learner.tokens_per_microbatch": 4,
        "data.train": ["a/b@main"],
        "env.token": "",
    }
    assert public(config) == config
