"""Streams of a server that is told to stop while they run."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import openai

from .served_model import ServedModel

NUM_STREAMS = 4
NUM_TOKENS = 200
WHOLE = [["length", f"{NUM_TOKENS} tokens"]] * NUM_STREAMS


def streams_through_sigterm(served: ServedModel, api_key: str = "none") -> list[list[str]]:
    """Finish reasons of the model `tiny`, one list a stream; SIGTERM comes when all have begun."""
    client = openai.OpenAI(base_url=served.url, api_key=api_key, max_retries=0, timeout=60)
    begun = Barrier(NUM_STREAMS + 1, timeout=60)

    def run(index: int) -> list[str]:
        stream = client.completions.create(
            model="tiny", prompt="abc" * (index + 1), max_tokens=NUM_TOKENS, temperature=0,
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(stream)
        begun.wait()
        heard = []
        try:
            for chunk in stream:
                heard += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
                heard += [f"{chunk.usage.completion_tokens} tokens"] if chunk.usage else []
        except openai.APIError as error:
            heard.append(str(error))
        return heard

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run, index) for index in range(NUM_STREAMS)]
        begun.wait()
        served.process.send_signal(signal.SIGTERM)
        return [stream.result(60) for stream in running]
