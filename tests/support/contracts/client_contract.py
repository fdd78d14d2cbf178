"""What the official client of the OpenAI API finds at a served model."""

from __future__ import annotations

import openai
import pytest


def check_client(url: str, api_key: str) -> None:
    """Answers and errors of the model `tiny`, served at `url` to those who know the key."""
    with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(
            model="tiny", prompt="abcabc", max_tokens=12, temperature=0
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        plain = client.completions.create(
            model="tiny", prompt="abcabc", max_tokens=12, temperature=0,
            extra_body={"speculative": {"enabled": False}},
        )  # fmt: skip
        assert plain.choices[0].text == whole.choices[0].text
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=3,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError, match="'tiny'"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
